"""What a run says of hardware, and software: for lines that every number carries."""

from bcg_harness.bench.record import BenchReport

UNKNOWN = "unknown"
"""Stands for what a file does not say."""


def is_emulated(report: BenchReport) -> bool:
    """Tell whether the segments were recorded by the CPU emulator."""
    return not str(report.environment.get("device", "")).startswith("cuda")


def versions(report: BenchReport) -> list[str]:
    """Return torch and, where there is one, the driver, each with its version."""
    found = [f"torch {report.libraries.get('torch', UNKNOWN)}"]
    if driver := report.environment.get("driver"):
        found.append(f"driver {driver}")
    return found
