"""Questions that several parts of a page ask about a run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bcg_harness.bench.cell import NO_BACKEND, Cell, Status
from bcg_harness.bench.context import UNKNOWN, is_emulated, versions
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Spread
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.environment import model_shape
from bcg_harness.errors import HarnessError

BASELINE = "eager"
"""The mode that speed-ups refer to."""
CONTENDER = "breakable"
"""The mode that all of this is about."""

_BUCKET = "bucket "
"""How what served a batch begins where that was a graph."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Hold the latency of one prompt.

    Attributes:
        tokens: of the prompt.
        latency: measured.
        graphless: a mode that replays graphs ran it without one.
    """

    tokens: int
    latency: Spread
    graphless: bool


def require_checks(report: BenchReport, name: str) -> None:
    """Raise HarnessError, which names the run ``name`` and the cell, for a time without a check within its budget."""
    for cell in report.cells:
        if cell.status is not Status.MEASURED:
            continue
        place = f"{name}: {cell.mode}, {cell.backend}, {cell.workload}"
        if cell.check is None:
            problem = "its result was never checked"
        elif not cell.check.error <= cell.check.budget:
            problem = f"its check found an error of {cell.check.error:.1e}, budget {cell.check.budget:.1e}"
        else:
            continue
        raise HarnessError(
            f"{place}: has times, but {problem}; a report shows only times that rest on a passed check: "
            "measure again with bcg bench --json"
        )


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


def fallbacks(report: BenchReport, cell: Cell) -> list[str]:
    """Return why batches of ``cell`` ran without a graph, though its mode replays graphs; nothing where all had one."""
    if cell.mode not in _replaying_modes(report):
        return []
    return [how for how in cell.served if not how.startswith(_BUCKET)]


def all_fallbacks(report: BenchReport, cells: Iterable[Cell]) -> str:
    """Return in words why any batch of ``cells`` ran without a graph; empty where all had one."""
    return "; ".join(dict.fromkeys(why for cell in cells for why in fallbacks(report, cell)))


def latency_of(cell: Cell | None) -> Spread | None:
    """Return the latency of a measured cell; None for any other."""
    return None if cell is None else cell.latency


def latencies(
    report: BenchReport, backend: str, mode: str, workloads: list[WorkloadRecord]
) -> Iterator[Point]:
    """Yield a point for each of those workloads that were measured."""
    for workload in workloads:
        cell = report.cell(backend, mode, workload.name)
        if cell is not None and cell.latency is not None:
            graphless = bool(fallbacks(report, cell))
            yield Point(tokens=workload.real_tokens, latency=cell.latency, graphless=graphless)


def context_line(report: BenchReport) -> str:
    """Return in one line what was measured on what."""
    environment, model = report.environment, report.model
    name, dtype = model.get("name", UNKNOWN), model.get("dtype", UNKNOWN)
    parts = [
        *(["CPU EMULATOR"] if is_emulated(report) else []),
        str(environment.get("hardware", UNKNOWN)),
        *versions(report),
        f"{name} ({model_shape(model)}), {dtype}",
        report.started[:16].replace("T", " "),
    ]
    return " · ".join(parts)


def _replaying_modes(report: BenchReport) -> set[str]:
    """Return the modes that captured a graph or were served by one, and breakable, which always tries to."""
    captured = {setup.mode for setup in report.setups if setup.buckets}
    served = {c.mode for c in report.cells if any(how.startswith(_BUCKET) for how in c.served)}
    return {CONTENDER} | captured | served
