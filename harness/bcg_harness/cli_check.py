"""``bcg check``: run the correctness matrix and print it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
import typer
from rich.console import Console

from bcg_core import BackendRegistry, negotiate_page_size
from bcg_harness.candidates import Candidate, name_note, select_backends
from bcg_harness.cli_errors import INTERRUPTED, usage_errors
from bcg_harness.cli_progress import loading, progress_bar
from bcg_harness.environment import Environment
from bcg_harness.expected_failures import expectations_of
from bcg_harness.json_file import require_writable, write_json
from bcg_harness.matrix import Matrix
from bcg_harness.memory import has_to_fit
from bcg_harness.models import resolve_model
from bcg_harness.outcome import CheckResult, Outcome
from bcg_harness.progress import Progress
from bcg_harness.report import CheckReport
from bcg_harness.selection import (
    DTYPES,
    parse_buckets,
    parse_device,
    parse_dtype,
    read_text,
    select_cases,
)
from bcg_harness.tables import check_table, context_line, problem_lines, summary_line
from bcg_harness.watching import runner_type


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Hold the options of the command as they were given; ``bcg check --help`` says what they mean."""

    backends: tuple[str, ...] = ()
    device: str = "cpu"
    model: str = "tiny"
    dtype: str | None = None
    buckets: str = "16,64,256"
    cases: tuple[str, ...] = ()
    text: Path | None = None
    page_size: int | None = None
    seed: int = 0
    json: Path | None = None
    debug: bool = False


def check_backends(options: CheckOptions) -> None:
    """Run what ``options`` ask for, print it, and exit: 0 if green, 1 if not, 2 for wrong use, 130 if interrupted."""
    try:
        with usage_errors(), progress_bar() as progress:
            report = run(options, progress)
    except KeyboardInterrupt as error:
        typer.echo("interrupted before the first case", err=True)
        raise typer.Exit(INTERRUPTED) from error
    console = Console()
    console.print(context_line(report), highlight=False, markup=False)
    for backend in report.backends:
        table = check_table(report, backend)
        if table is not None:
            console.print(table)
        for note in [*report.notes.get(backend, ()), report.untested.get(backend)]:
            if note is not None:
                console.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)
    for line in problem_lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(summary_line(report), highlight=False)
    if options.json is not None:
        with usage_errors():
            write_json(report.to_json(), options.json)
        console.print(f"written to {options.json}", highlight=False, markup=False)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.is_green:
        raise typer.Exit(1)


def run(options: CheckOptions, progress: Progress) -> CheckReport:
    """Run what ``options`` ask for; raises a BcgError, before anything long, for what they ask wrongly.

    Ctrl-C between the first case and the last ends the run, and the report says so; before that it is raised.
    """
    started = perf_counter()
    if options.json is not None:
        require_writable(options.json)
    device = parse_device(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    dtype = parse_dtype(options.dtype, device)
    buckets = parse_buckets(options.buckets)
    registry = BackendRegistry()
    candidates, results = select_backends(
        options.backends or registry.names(),
        registry,
        device=device,
        required=bool(options.backends),
    )
    page_size = options.page_size or negotiate_page_size(
        candidate.selected.capabilities for candidate in candidates
    )
    # Names of cases do not depend on the model: complain about them before it is loaded.
    select_cases(options.cases, buckets, page_size=page_size, max_context=2048)
    text = None if options.text is None else read_text(options.text)
    resolved = resolve_model(
        options.model,
        dtype=dtype,
        device=device,
        seed=options.seed,
        progress=loading(progress),
    )
    spec = resolved.model.spec
    cases = select_cases(
        options.cases, buckets, page_size=page_size, max_context=spec.max_positions
    )
    declared, broken = expectations_of(candidates, cases, buckets)
    results += broken
    source = resolved.token_source(text, seed=options.seed)
    with has_to_fit(
        "the KV cache", hint="choose smaller --buckets, fewer --case or a smaller model"
    ):
        matrix = Matrix(
            resolved.model,
            cases,
            buckets,
            source,
            page_size=page_size,
            runner_type=runner_type(debug=options.debug),
            progress=progress,
        )
    planned, finished = len(declared) * len(cases), 0
    try:
        for number, (candidate, expectations) in enumerate(declared):
            found: list[CheckResult] = []
            for of_case in matrix.each_case(
                candidate.label, candidate.backend, **candidate.options
            ):
                found += of_case
                results += [
                    expectations.mark(_with_advice(result, candidate, dtype)) for result in of_case
                ]
                finished += 1
            results += expectations.stale(found)
            finished = (number + 1) * len(cases)  # also when the backend could not be used
    except KeyboardInterrupt:
        if not finished:
            raise
    return CheckReport(
        environment=Environment.of(spec.device),
        model=options.model,
        spec=spec,
        buckets=tuple(buckets),
        settings={
            "page_size": page_size,
            "seed": options.seed,
            "text": None if options.text is None else str(options.text),
            "debug": options.debug,
        },
        capture=matrix.capture_report,
        cases=tuple(cases),
        notes=_notes(matrix, candidates),
        untested=matrix.untested,
        results=tuple(results),
        expectations=tuple(expectations for _, expectations in declared),
        seconds=perf_counter() - started,
        planned=planned,
        finished=finished,
    )


def _notes(matrix: Matrix, candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """Return what backends say of themselves, and what there is to say of their names, by label."""
    notes = dict(matrix.notes)
    for candidate in candidates:
        note = name_note(candidate)
        if note is not None:
            notes[candidate.label] = [*notes.get(candidate.label, ()), note]
    return notes


def _with_advice(result: CheckResult, candidate: Candidate, dtype: torch.dtype) -> CheckResult:
    """Add to a backend that was skipped for its dtypes which one to try."""
    served = candidate.selected.capabilities.dtypes
    if result.outcome is not Outcome.SKIPPED or result.case is not None or dtype in served:
        return result
    first = next((name for name, known in DTYPES.items() if known in served), None)
    advice = "" if first is None else f" (try --dtype {first})"
    return replace(result, detail=result.detail + advice)
