"""Everything that was measured, a table a workload; and what was not, with its reasons."""

from collections.abc import Iterator
from dataclasses import dataclass

from bcg_harness.bench.cell import NO_BACKEND, Cell, Status
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.html.headline import verdict_class
from bcg_harness.html.runs import fallbacks
from bcg_harness.html.units import NOTHING, duration, milliseconds, percent, ratio, whole

COLUMNS = (
    ("latency", ("median", "p90", "IQR")),
    ("over eager", ("speed-up", "verdict")),
    ("TTFT", ("median", "p90")),
    ("host", ("enqueue", "launches")),
    ("device", ("busy", "gap", "kernels")),
    ("rows", ("padding",)),
    ("rate", ("tokens/s",)),
    ("memory", ("peak GiB",)),
    ("check", ("error", "budget")),
    ("batches", ("served by",)),
)
"""Heads of the columns, in groups. Times are milliseconds."""
WIDTH = sum(len(columns) for _, columns in COLUMNS)
"""Columns of numbers in a row."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one cell of the run as a row.

    Attributes:
        mode: name.
        numbers: (text, class) of each column; empty for a cell that was not measured.
        missing: the status of a cell that was not measured, or nothing.
        mark: on a cell with batches that ran without a graph though its mode replays them; empty for any other.
    """

    mode: str
    numbers: tuple[tuple[str, str], ...]
    missing: str
    mark: str


@dataclass(frozen=True, kw_only=True)
class WorkloadTable:
    """Hold all cells of one workload.

    Attributes:
        name: of the workload.
        description: of the workload.
        fastest: in words.
        rows: by backend.
    """

    name: str
    description: str
    fastest: str
    rows: dict[str, list[Row]]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Hold cells that were not measured for one reason.

    Attributes:
        status: word for what they are.
        mode: name.
        reason: in the words of the mode, backend or check.
        places: backends and workloads, in words.
    """

    status: str
    mode: str
    reason: str
    places: str


def backend_title(backend: str) -> str:
    """Return how a backend is called in tables."""
    return "attention of the mode’s own" if backend == NO_BACKEND else backend


def workload_tables(report: BenchReport) -> list[WorkloadTable]:
    """Return a table for each workload of the run, in order."""
    return [_table(report, workload) for workload in report.workloads]


def gaps(report: BenchReport) -> list[Gap]:
    """Return all cells without times, gathered by mode and reason; what is wrong comes first."""
    gathered: dict[tuple[Status, str, str], dict[str, list[str]]] = {}
    for cell in report.cells:
        if cell.status is not Status.MEASURED:
            places = gathered.setdefault((cell.status, cell.mode, cell.reason), {})
            places.setdefault(backend_title(cell.backend), []).append(cell.workload)
    order = {Status.FAILED: 0, Status.ERROR: 1, Status.UNAVAILABLE: 2}
    found = [
        Gap(status=status.value, mode=mode, reason=reason, places=_places(report, places))
        for (status, mode, reason), places in gathered.items()
    ]
    return sorted(found, key=lambda gap: order[Status(gap.status)])


def _places(report: BenchReport, places: dict[str, list[str]]) -> str:
    by_workloads: dict[str, list[str]] = {}
    for backend, workloads in places.items():
        everywhere = len(workloads) > 1 and len(workloads) == len(report.workloads)
        by_workloads.setdefault("all workloads" if everywhere else ", ".join(workloads), []).append(
            backend
        )
    return "; ".join(
        f"{', '.join(backends)}: {workloads}" for workloads, backends in by_workloads.items()
    )


def _table(report: BenchReport, workload: WorkloadRecord) -> WorkloadTable:
    cells = [cell for cell in report.cells if cell.workload == workload.name]
    rows: dict[str, list[Row]] = {}
    for cell in cells:
        rows.setdefault(backend_title(cell.backend), []).append(_row(report, cell))
    timed = [(cell.latency.median, cell) for cell in cells if cell.latency is not None]
    fastest = "nothing was measured"
    if timed:
        seconds, best = min(timed, key=lambda pair: pair[0])
        own = best.backend == NO_BACKEND
        where = best.mode if own else f"{best.mode} with {best.backend}"
        mark = _mark(report, best)
        fastest = f"fastest: {where}, {duration(seconds)}{f' ({mark})' if mark else ''}"
    return WorkloadTable(
        name=workload.name, description=workload.description, fastest=fastest, rows=rows
    )


def _mark(report: BenchReport, cell: Cell) -> str:
    without = len(fallbacks(report, cell))
    if not without:
        return ""
    return "no graph" if without == len(cell.served) else "partly no graph"


def _row(report: BenchReport, cell: Cell) -> Row:
    if cell.status is not Status.MEASURED:
        return Row(mode=cell.mode, numbers=(), missing=cell.status.value, mark="")
    mark = _mark(report, cell)
    return Row(mode=cell.mode, numbers=tuple(_numbers(cell, mark)), missing="", mark=mark)


def _numbers(cell: Cell, mark: str) -> Iterator[tuple[str, str]]:
    latency, ttft, enqueue, device = cell.latency, cell.ttft, cell.enqueue, cell.device
    yield milliseconds(latency.median if latency else None), "main"
    yield milliseconds(latency.p90 if latency else None), ""
    yield milliseconds(latency.iqr if latency else None), ""
    if cell.speedup is None:
        yield NOTHING, ""
        yield "", ""
    else:
        # A speed-up without a graph is none of the mode's: no colour says that it is good.
        shown = "close" if mark else verdict_class(cell.speedup.verdict)
        verdict = cell.speedup.verdict.value
        yield ratio(cell.speedup.ratio), shown
        yield f"{verdict}, {mark}" if mark else verdict, f"word {shown}"
    yield milliseconds(ttft.median if ttft else None), ""
    yield milliseconds(ttft.p90 if ttft else None), ""
    yield milliseconds(enqueue.median if enqueue else None), ""
    yield whole(device.launches if device else None), ""
    yield milliseconds(device.busy if device else None), ""
    # Below zero the device was busy for longer than the prefill takes unprofiled: that is no gap.
    yield milliseconds(device.gap if device and device.gap >= 0 else None), ""
    yield whole(device.kernels if device else None), ""
    yield percent(cell.padding), ""
    yield whole(cell.tokens_per_second), ""
    yield (NOTHING if cell.peak_memory is None else f"{cell.peak_memory / 2**30:.2f}"), ""
    yield (f"{cell.check.error:.1e}" if cell.check else NOTHING), ""
    yield (f"{cell.check.budget:.1e}" if cell.check else NOTHING), ""
    yield ", ".join(f"{how} ({times} times)" for how, times in cell.served.items()), "word served"
