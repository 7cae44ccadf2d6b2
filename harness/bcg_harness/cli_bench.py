"""``bcg bench``: measure, print a summary, and keep everything as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter

import torch
import typer
from rich.console import Console

from bcg_core import BackendRegistry, negotiate_page_size
from bcg_harness.bench.bench import Bench
from bcg_harness.bench.bucket_costs import measure_buckets
from bcg_harness.bench.cell import Cell, Status
from bcg_harness.bench.costs import BreakOverhead, BucketCost
from bcg_harness.bench.defaults import default_ladder, default_workloads, fitting
from bcg_harness.bench.device_times import profile_cells
from bcg_harness.bench.families import parse_workload
from bcg_harness.bench.longer import Longer
from bcg_harness.bench.modes import select_modes
from bcg_harness.bench.overhead import measure_break_overhead
from bcg_harness.bench.record import INTERRUPTED, BenchReport
from bcg_harness.bench.tables import (
    context_line,
    emulator_line,
    fallback_lines,
    latency_tables,
    note_lines,
    overhead_line,
    problem_lines,
    setup_table,
    summary_line,
)
from bcg_harness.bench.timeline import Timeline
from bcg_harness.bench.timing import Effort
from bcg_harness.bench.trace import Trace
from bcg_harness.bench.workloads import Workload
from bcg_harness.candidates import Candidate, select_backends
from bcg_harness.cli_errors import usage_errors
from bcg_harness.cli_progress import loading, progress_bar
from bcg_harness.environment import Environment, describe_model
from bcg_harness.errors import DeviceLostError, HarnessError
from bcg_harness.json_file import require_writable, write_json
from bcg_harness.memory import has_to_fit
from bcg_harness.models import resolve_model
from bcg_harness.outcome import CheckResult, Outcome, describe
from bcg_harness.progress import Progress
from bcg_harness.selection import parse_buckets, parse_device, parse_dtype

_INTERRUPTED = 130
_LOG_WIDTH = 160
"""Characters of a line where no terminal says how many there are."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Hold the options of the command as they were given; ``bcg bench --help`` says what they mean."""

    backends: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    traces: tuple[Path, ...] = ()
    longer: Longer = Longer.SKIP
    device: str = "cpu"
    model: str = "tiny"
    dtype: str | None = None
    buckets: str | None = None
    page_size: int | None = None
    token_budget: int = 2048
    max_requests: int = 64
    seconds: float = 0.4
    seed: int = 0
    profile: bool = True
    bucket_costs: bool = False
    json: Path | None = None


def bench_backends(options: BenchOptions) -> None:
    """Run what ``options`` ask for, print it, and exit: 0 if all is well, 1 for wrong results or errors, 2 or 130."""
    with usage_errors(), progress_bar() as progress:
        report = run(options, progress)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    console.print(context_line(report), highlight=False, markup=False, soft_wrap=True)
    for backend in report.backends():
        for table in latency_tables(report, backend, console.width):
            console.print(table)
    if report.setups:
        console.print(setup_table(report))
    lines = [
        overhead_line(report),
        *fallback_lines(report),
        *note_lines(report),
        *problem_lines(report),
        emulator_line(report),
    ]
    for line in [*filter(None, lines), summary_line(report)]:
        console.print(line, highlight=False, soft_wrap=True)
    if options.json is not None:
        with usage_errors():
            write_json(report.to_json(), options.json)
        console.print(f"written to {options.json}", highlight=False, markup=False)
    if report.end == INTERRUPTED:
        raise typer.Exit(_INTERRUPTED)
    statuses = {cell.status for cell in report.cells}
    wrong = statuses & {Status.FAILED, Status.ERROR} or report.broken
    if report.end or wrong or Status.MEASURED not in statuses:
        raise typer.Exit(1)


def run(options: BenchOptions, progress: Progress) -> BenchReport:
    """Run what ``options`` ask for; raises a BcgError, before anything long, for what they ask wrongly.

    Ctrl-C ends the run, and the report has what was measured until then.
    """
    started, began = datetime.now().astimezone(), perf_counter()
    if options.json is not None:
        require_writable(options.json)
    device = parse_device(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    dtype = parse_dtype(options.dtype, device)
    modes = select_modes(options.modes, device)
    workloads, traces = select_workloads(options, device, progress)
    buckets = None if options.buckets is None else parse_buckets(options.buckets)
    candidates, others = _select(options.backends, device)
    resolved = resolve_model(
        options.model, dtype=dtype, device=device, seed=options.seed, progress=loading(progress)
    )
    spec = resolved.model.spec
    workloads, left_out = fitting(workloads, spec.max_positions, chosen=_chosen(options))
    workloads += [
        trace.workload(
            token_budget=options.token_budget,
            max_requests=options.max_requests,
            max_context=spec.max_positions,
            longer=options.longer,
        )
        for trace in traces
    ]
    ladder = buckets or default_ladder(device, spec.max_positions)
    page_size = options.page_size or negotiate_page_size(
        candidate.selected.capabilities for candidate in candidates
    )
    with has_to_fit(
        "the KV cache", hint="choose smaller workloads, a smaller --page-size or a smaller model"
    ):
        bench = Bench(
            resolved.model,
            workloads,
            modes,
            resolved.token_source(None, seed=options.seed),
            buckets=ladder,
            page_size=page_size,
            effort=Effort(seconds=options.seconds),
            progress=progress,
        )
    for workload in workloads:
        bench.note(workload.name, workload.notes)
    found = measure(bench, candidates, options)
    return BenchReport(
        started=started.isoformat(timespec="seconds"),
        seconds=perf_counter() - began,
        environment=Environment.of(spec.device).to_json(),
        model={"name": options.model, **describe_model(spec)},
        settings={
            "buckets": list(ladder),
            "page_size": page_size,
            "token_budget": options.token_budget,
            "longer": options.longer.value,
            "seconds": options.seconds,
            "seed": options.seed,
            "modes": [mode.name for mode in modes],
        },
        workloads=tuple(workload.record() for workload in workloads),
        skipped={**_details(others, Outcome.SKIPPED), **bench.skipped},
        notes={**bench.notes, **left_out},
        setups=tuple(bench.setups),
        cells=tuple(found.cells),
        break_overhead=found.break_overhead,
        bucket_costs=tuple(found.bucket_costs),
        timelines=tuple(found.timelines),
        broken={**_details(others, Outcome.ERROR), **bench.broken},
        end=found.end,
    )


def _details(results: Sequence[CheckResult], outcome: Outcome) -> dict[str, str]:
    return {each.backend: each.detail for each in results if each.outcome is outcome}


@dataclass
class Found:
    """Hold what a run has measured so far; see the fields of ``BenchReport``."""

    cells: list[Cell] = field(default_factory=list)
    break_overhead: BreakOverhead | None = None
    bucket_costs: list[BucketCost] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    end: str | None = None


def measure(bench: Bench, candidates: Sequence[Candidate], options: BenchOptions) -> Found:
    """Measure everything that ``options`` ask for; what is profiled comes last, as nothing can be timed after it."""
    found, on_gpu = Found(), bench.ground.device.type == "cuda"
    try:
        for cell in bench.cells(candidates):
            found.cells.append(cell)
        if options.bucket_costs:
            for cost in measure_buckets(bench, candidates):
                found.bucket_costs.append(cost)
        if on_gpu:
            bench.progress.start("measuring empty breaks", 1)
            bench.arena.leave()
            found.break_overhead = measure_break_overhead(bench.ground)
        if on_gpu and options.profile:
            _profile(bench, candidates, found)
    except KeyboardInterrupt:
        found.end = INTERRUPTED
    except DeviceLostError as error:
        found.end = str(error)
    return found


def _profile(bench: Bench, candidates: Sequence[Candidate], found: Found) -> None:
    """Add device times and time lines; a profiler that fails takes nothing away from what was timed."""
    try:
        found.cells, found.timelines = profile_cells(bench, candidates, found.cells)
    except DeviceLostError:
        raise
    except Exception as error:  # noqa: BLE001  # the profiler's, the driver's, whatever it is
        found.end = f"the profiler failed, so there are no device times: {describe(error)}"


def select_workloads(
    options: BenchOptions, device: torch.device, progress: Progress
) -> tuple[list[Workload], list[Trace]]:
    """Return the workloads and traces that were asked for, or the default ones of ``device``, each once."""
    names = options.workloads if _chosen(options) else default_workloads(device)
    found: list[Workload | Trace] = [
        parse_workload(name, seed=options.seed, token_budget=options.token_budget) for name in names
    ]
    found += [Trace.read(path, progress) for path in options.traces]
    by_name: dict[str, Workload | Trace] = {}
    for each in found:
        if by_name.setdefault(each.name, each) != each:
            raise HarnessError(
                f"two different workloads are called {each.name!r}: rename one of the files"
            )
    once = list(by_name.values())
    workloads = [each for each in once if isinstance(each, Workload)]
    return workloads, [each for each in once if isinstance(each, Trace)]


def _chosen(options: BenchOptions) -> bool:
    return bool(options.workloads or options.traces)


def _select(
    names: tuple[str, ...], device: torch.device
) -> tuple[list[Candidate], list[CheckResult]]:
    registry = BackendRegistry()
    candidates, others = select_backends(
        names or registry.names(), registry, device=device, required=bool(names)
    )
    broken = [result for result in others if result.outcome is Outcome.ERROR]
    if names and broken:
        raise HarnessError(f"{broken[0].backend}: {broken[0].detail}")
    return candidates, others
