"""What ``bcg bench`` shows: times for people, on a terminal or in a log; the JSON file has all the rest."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bcg_harness.bench.cell import NO_BACKEND, Cell, Status
from bcg_harness.bench.context import UNKNOWN, is_emulated, versions
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Verdict
from bcg_harness.environment import model_shape

_MIB = 2**20
_MODE_WIDTH = 14
_TOKENS_WIDTH = 9
_STYLES = {
    Verdict.FASTER: "green",
    Verdict.SLOWER: "red",
    Verdict.TOO_CLOSE: "dim",
}
_WORDS = {
    Status.UNAVAILABLE: "[yellow]n/a[/]",
    Status.FAILED: "[bold red]WRONG[/]",
    Status.ERROR: "[bold red]ERROR[/]",
}


def context_line(report: BenchReport) -> str:
    """Return in one line what was measured on what."""
    machine = [str(report.environment.get(key, UNKNOWN)) for key in ("engine", "hardware")]
    name, dtype = report.model.get("name", UNKNOWN), report.model.get("dtype", UNKNOWN)
    parts = [
        ", ".join([*machine, *versions(report)]),
        f"{name} ({model_shape(report.model)})",
        str(dtype),
    ]
    ladder = report.settings.get("buckets")
    if isinstance(ladder, list) and ladder:
        pages = report.settings.get("page_size", UNKNOWN)
        parts.append(f"{len(ladder)} buckets up to {ladder[-1]}, pages of {pages}")
    return " | ".join(parts)


def emulator_line(report: BenchReport) -> str | None:
    """Say that times are those of the emulator; None where graphs were real."""
    if not is_emulated(report):
        return None
    return "[bold yellow]These are times of the CPU emulator: they say nothing of a GPU.[/]"


def latency_tables(report: BenchReport, backend: str, width: int) -> Iterator[Table]:
    """Yield tables of ``backend``, no wider than ``width`` where possible: a row for each workload, a column a mode."""
    modes = [m for m in report.modes() if any(_of(report, backend, m))]
    names = max((len(workload.name) for workload in report.workloads), default=0)
    each = max(1, (width - names - _TOKENS_WIDTH) // _MODE_WIDTH)
    for first in range(0, len(modes), each):
        yield _latency_table(report, backend, modes[first : first + each])


def _latency_table(report: BenchReport, backend: str, modes: Sequence[str]) -> Table:
    own = backend == NO_BACKEND
    caption = "median latency in ms"
    if not own:
        caption += ", and how many times as fast as eager; ~: too close to call"
    cells = [cell for mode in modes for cell in _of(report, backend, mode)]
    if any(cell.fallbacks for cell in cells):
        caption += "; *: ran without a graph, at least in part"
    table = Table(
        title="attention of their own" if own else f"backend {escape(backend)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=caption,
        caption_justify="left",
    )
    table.add_column("workload", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    for mode in modes:
        table.add_column(mode.replace("_", "\n", 1), justify="right", no_wrap=True)
    for workload in report.workloads:
        of_workload = [report.cell(backend, mode, workload.name) for mode in modes]
        if any(of_workload):
            tokens = str(workload.real_tokens)
            table.add_row(escape(workload.name), tokens, *map(_latency, of_workload))
    return table


def setup_table(report: BenchReport) -> Table:
    """Return a table of what it took to make modes ready."""
    table = Table(title="set-up", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("mode", "backend"):
        table.add_column(name, overflow="fold")
    for name in ("buckets", "warm-up s", "capture s", "graphs MiB"):
        table.add_column(name, justify="right")
    for setup in report.setups:
        memory = "-" if setup.graph_memory is None else f"{setup.graph_memory / _MIB:.0f}"
        table.add_row(
            setup.mode,
            escape("any" if setup.backend == NO_BACKEND else setup.backend),
            str(len(setup.buckets)) if setup.buckets else "-",
            f"{setup.warm_up_seconds:.2f}",
            f"{setup.capture_seconds:.2f}",
            memory,
        )
    return table


def overhead_line(report: BenchReport) -> str | None:
    """Say what an empty break costs; None where it was not measured."""
    found = report.break_overhead
    if found is None:
        return None
    line = f"a break that does nothing costs the host {found.host_per_break * 1e6:.1f} us"
    if found.wall_per_break is None:
        line += ", and a replay no more time than one graph without it"
    else:
        wall = found.wall_per_break * 1e6
        line += f"; a replay takes {abs(wall):.1f} us {'more' if wall > 0 else 'less'} than one graph without it"
    return f"{line} (bucket {found.bucket}, {found.breaks} breaks)"


def note_lines(report: BenchReport) -> Iterator[str]:
    """Yield what backends and modes say of themselves, as markup."""
    for label, notes in report.notes.items():
        for note in notes:
            yield f"[dim]{escape(label)}:[/] {escape(note)}"


def fallback_lines(report: BenchReport) -> Iterator[str]:
    """Yield which batches ran without a graph, and why, as markup."""
    reasons = Counter((cell.workload, why) for cell in report.cells for why in cell.fallbacks)
    for workload, why in reasons:
        yield f"[yellow]*[/] {escape(workload)}: ran eagerly in modes with graphs: {escape(why)}"


def problem_lines(report: BenchReport) -> Iterator[str]:
    """Yield why cells have no times, and why backends were skipped, as markup; equal reasons once."""
    reasons = Counter(
        (cell.status, cell.backend, cell.mode, cell.reason)
        for cell in report.cells
        if cell.status is not Status.MEASURED
    )
    for (status, backend, mode, reason), count in reasons.items():
        where = mode if backend == NO_BACKEND else f"{backend} / {mode}"
        times = f" ({count} workloads)" if count > 1 else ""
        yield f"{_WORDS[status]} {escape(where)}{times}: {escape(reason)}"
    for backend, reason in report.broken.items():
        yield f"{_WORDS[Status.ERROR]} {escape(backend)}: {escape(reason)}"
    for backend, reason in report.skipped.items():
        yield f"[yellow]skip[/] {escape(backend)}: {escape(reason)}"


def summary_line(report: BenchReport) -> str:
    """Return counts of cells, as markup."""
    counts = Counter(cell.status for cell in report.cells)
    measured = counts[Status.MEASURED]
    checked = ", each between two passing checks" if measured else ""
    parts = [f"[green]{measured} measured[/]{checked}"]
    counts[Status.ERROR] += len(report.broken)
    for status, word in (
        (Status.UNAVAILABLE, "not available"),
        (Status.FAILED, "[bold red]wrong[/]"),
        (Status.ERROR, "[bold red]errors[/]"),
    ):
        if counts[status]:
            parts.append(f"{counts[status]} {word}")
    end = f"\n[bold red]ended early:[/] {escape(report.end)}" if report.end else ""
    return f"{', '.join(parts)} in {report.seconds:.0f} s{end}"


def _of(report: BenchReport, backend: str, mode: str) -> list[Cell]:
    return [cell for cell in report.cells if cell.backend == backend and cell.mode == mode]


def _latency(cell: Cell | None) -> str:
    if cell is None:
        return "[dim]-[/]"
    if cell.latency is None:
        return _WORDS[cell.status]
    text = _milliseconds(cell.latency.median) + "*" * bool(cell.fallbacks)
    if cell.speedup is None:
        return text
    verdict = cell.speedup.verdict
    ratio = f"{'~' * (verdict is Verdict.TOO_CLOSE)}{cell.speedup.ratio:.2f}x"
    return f"{text} [{_STYLES[verdict]}]{ratio:>6}[/]"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
