"""Questions that several parts of a page ask about a run."""

from collections.abc import Iterator

from bcg_harness.bench.record import NO_BACKEND, BenchReport, Cell, WorkloadRecord
from bcg_harness.bench.spread import Spread

BASELINE = "eager"
"""The mode that speed-ups refer to."""
CONTENDER = "breakable"
"""The mode that all of this is about."""
UNKNOWN = "unknown"
"""Stands for what a file does not say."""


def single_prompts(report: BenchReport) -> list[WorkloadRecord]:
    """Return the workloads of one prompt without prefix in one batch, shortest first."""
    single = [w for w in report.workloads if len(w.steps) == 1 and len(w.steps[0]) == 1]
    return sorted((w for w in single if w.steps[0][0][0] == 0), key=lambda w: w.real_tokens)


def other_workloads(report: BenchReport) -> list[WorkloadRecord]:
    """Return all other workloads, in the order of the run."""
    names = {workload.name for workload in single_prompts(report)}
    return [workload for workload in report.workloads if workload.name not in names]


def real_backends(report: BenchReport) -> list[str]:
    """Return the backends with cells, without what stands for attention of a mode's own."""
    return [backend for backend in report.backends() if backend != NO_BACKEND]


def latency_of(cell: Cell | None) -> Spread | None:
    """Return the latency of a measured cell; None for any other."""
    return None if cell is None else cell.latency


def latencies(
    report: BenchReport, backend: str, mode: str, workloads: list[WorkloadRecord]
) -> Iterator[tuple[int, Spread]]:
    """Yield tokens and latency of those workloads that were measured."""
    for workload in workloads:
        spread = latency_of(report.cell(backend, mode, workload.name))
        if spread is not None:
            yield workload.real_tokens, spread


def is_emulated(report: BenchReport) -> bool:
    """Tell whether the segments were recorded by the CPU emulator."""
    return not str(report.environment.get("device", "")).startswith("cuda")


def context_line(report: BenchReport) -> str:
    """Return in one line what was measured on what."""
    environment, model = report.environment, report.model
    libraries = environment.get("libraries", {})
    parts = [
        str(environment.get("hardware", UNKNOWN)),
        f"torch {libraries.get('torch', UNKNOWN)}",
        f"{model.get('name', UNKNOWN)} ({shape(report)}), {model.get('dtype', UNKNOWN)}",
        report.started[:16].replace("T", " "),
    ]
    if driver := environment.get("driver"):
        parts.insert(1, f"driver {driver}")
    if is_emulated(report):
        parts.insert(0, "CPU EMULATOR")
    return " · ".join(parts)


def shape(report: BenchReport) -> str:
    """Return the shape of the model in words."""
    model = report.model
    return (
        f"{model.get('num_layers', '?')} layers, D {model.get('hidden_size', '?')}, "
        f"{model.get('num_heads', '?')}/{model.get('num_kv_heads', '?')} heads of {model.get('head_dim', '?')}"
    )
