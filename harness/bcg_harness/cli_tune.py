"""``bcg tune``: propose a bucket ladder, print it beside others, and write it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from bcg_core import TokenBuckets
from bcg_harness.bench.families import parse_workload
from bcg_harness.bench.longer import Longer
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.tables import context_line, emulator_line
from bcg_harness.bench.trace import Trace
from bcg_harness.bench.workloads import Workload, check_fits
from bcg_harness.cli_errors import usage_errors
from bcg_harness.cli_progress import progress_bar
from bcg_harness.errors import HarnessError
from bcg_harness.json_file import require_writable, write_json
from bcg_harness.progress import Progress
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import select_costs
from bcg_harness.tune.distribution import TokenDistribution, read_lengths
from bcg_harness.tune.proposal import Proposal, propose
from bcg_harness.tune.table import batches_line, ladder_table, note_lines, proposal_line

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Hold the options of the command as they were given; ``bcg tune --help`` says what they mean."""

    costs: Path
    backend: str | None = None
    lengths: tuple[Path, ...] = ()
    workloads: tuple[str, ...] = ()
    traces: tuple[Path, ...] = ()
    longer: Longer = Longer.SKIP
    token_budget: int = 2048
    max_requests: int = 64
    seed: int = 0
    memory_budget: float | None = None
    start_up_budget: float | None = None
    max_buckets: int | None = None
    step: int | None = None
    output: Path | None = None
    json: Path | None = None


def tune_ladder(options: TuneOptions) -> None:
    """Do what ``options`` ask for, print it, and exit: 0 with a ladder, 1 with none to write, 2 for wrong use."""
    with usage_errors(), progress_bar() as progress:
        report, proposal, notes = run(options, progress)
    console = Console()
    console.print(f"costs: {context_line(report)}", highlight=False, markup=False, soft_wrap=True)
    console.print(batches_line(proposal), highlight=False, markup=False, soft_wrap=True)
    console.print(ladder_table(proposal))
    emulated = emulator_line(report)
    for line in [*map(escape, notes), *note_lines(proposal), *([emulated] if emulated else [])]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(proposal_line(proposal), highlight=False, markup=False, soft_wrap=True)
    with usage_errors():
        written = _write(options, report, proposal, notes)
    for path in written:
        console.print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)
    if options.output is not None and options.output not in written:
        typer.echo(f"{options.output} is not written: there is no ladder for it", err=True)
        raise typer.Exit(1)


def run(options: TuneOptions, progress: Progress) -> tuple[BenchReport, Proposal, list[str]]:
    """Return the measured costs, what they lead to, and what a reader should know of the traces.

    Raises a BcgError for what ``options`` ask wrongly.
    """
    _check_written(options)
    memory = options.memory_budget
    budgets = LadderBudgets(
        max_buckets=options.max_buckets,
        capture_seconds=options.start_up_budget,
        memory_bytes=None if memory is None else memory * _MIB,
    )
    report = BenchReport.load(options.costs)
    try:
        costs = select_costs(report.bucket_costs, options.backend)
    except HarnessError as error:
        raise HarnessError(f"{options.costs}: {error}") from error
    workloads = _workloads(options, report, progress)
    distribution = TokenDistribution.of(_batches(options, workloads))
    notes = [f"{workload.name}: {note}" for workload in workloads for note in workload.notes]
    return report, propose(distribution, costs, budgets, step=options.step), notes


def _check_written(options: TuneOptions) -> None:
    """Raise HarnessError for a file to be written that is also read or written twice, or that cannot be written."""
    named = {options.costs.resolve(): "--costs"}
    named |= {path.resolve(): "--lengths" for path in options.lengths}
    named |= {path.resolve(): "--trace" for path in options.traces}
    for option, path in (("--output", options.output), ("--json", options.json)):
        if path is None:
            continue
        other = named.setdefault(path.resolve(), option)
        if other != option:
            raise HarnessError(f"{other} and {option} both name {path}: give two files")
        require_writable(path)


def _workloads(options: TuneOptions, report: BenchReport, progress: Progress) -> list[Workload]:
    """Return workloads and traces; raises HarnessError for one that the measured model cannot hold."""
    budget = options.token_budget
    found = report.model.get("max_positions")
    context = found if isinstance(found, int) else None
    workloads = [
        parse_workload(each, seed=options.seed, token_budget=budget) for each in options.workloads
    ]
    if context is not None:
        for workload in workloads:
            check_fits(workload, context)
    return workloads + [
        Trace.read(path, progress).workload(
            token_budget=budget,
            max_requests=options.max_requests,
            max_context=context,
            longer=options.longer,
        )
        for path in options.traces
    ]


def _batches(options: TuneOptions, workloads: Sequence[Workload]) -> list[tuple[int, float]]:
    """Return tokens and weight of all batches that were asked for; a batch of a workload weighs 1."""
    batches = [batch for path in options.lengths for batch in read_lengths(path)]
    batches += [(tokens, 1.0) for workload in workloads for tokens in workload.batch_tokens()]
    if not batches:
        raise HarnessError(
            "nothing to tune for: give token counts of batches with --lengths FILE, requests with --trace FILE, "
            "or --workload NAME"
        )
    return batches


def _write(
    options: TuneOptions, report: BenchReport, proposal: Proposal, notes: Sequence[str]
) -> list[Path]:
    """Write what was asked for, and return which files were."""
    context = {**_context(options, report), "notes": list(notes)}
    written = []
    if options.output is not None and proposal.proposed.ladder:
        about = {**context, "expected": proposal.proposed.to_json()}
        TokenBuckets(proposal.proposed.ladder).save(options.output, about=about)
        written.append(options.output)
    if options.json is not None:
        write_json({**context, **proposal.to_json()}, options.json)
        written.append(options.json)
    return written


def _context(options: TuneOptions, report: BenchReport) -> dict[str, Any]:
    """Return what the proposal rests on."""
    return {
        "kind": "bcg tune",
        "schema": 1,
        "costs": str(options.costs),
        "measured": report.started,
        "environment": dict(report.environment),
        "model": dict(report.model),
        "settings": {
            "lengths": [str(path) for path in options.lengths],
            "workloads": list(options.workloads),
            "traces": [str(path) for path in options.traces],
            "longer": options.longer.value,
            "token_budget": options.token_budget,
            "max_requests": options.max_requests,
            "seed": options.seed,
            "step": options.step,
        },
    }
