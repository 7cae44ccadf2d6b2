"""``bcg fuzz``: check random batch compositions, and write what fails as cases that ``bcg check`` replays."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from time import perf_counter

import typer
from rich.console import Console
from rich.markup import escape

from bcg_harness.checks import CHECK_NAMES, MECHANISM
from bcg_harness.cli_errors import INTERRUPTED, usage_errors
from bcg_harness.cli_progress import progress_bar
from bcg_harness.cli_subject import Subject
from bcg_harness.environment import Environment, dtype_name
from bcg_harness.errors import HarnessError
from bcg_harness.fuzz.draw import Bounds
from bcg_harness.fuzz.fuzz import Fuzz
from bcg_harness.fuzz.plan import Plan
from bcg_harness.fuzz.record import Counterexample, FuzzReport
from bcg_harness.json_file import require_folder, require_writable, write_json
from bcg_harness.outcome import Outcome
from bcg_harness.progress import Progress
from bcg_harness.selection import parse_buckets


@dataclass(frozen=True, kw_only=True)
class FuzzOptions:
    """Hold the options of the command as they were given; ``bcg fuzz --help`` says what they mean."""

    cases: int = 1000
    seed: int = 0
    backends: tuple[str, ...] = ()
    device: str = "cpu"
    model: str = "tiny"
    dtype: str | None = None
    buckets: str | None = None
    page_size: int | None = None
    checks: str = "all"
    max_failures: int = 1
    output: Path = Path()
    json: Path | None = None


def fuzz_backends(options: FuzzOptions) -> None:
    """Run what ``options`` ask for, print it, and exit: 0 if green, 1 if not, 2 for wrong use, 130 if interrupted."""
    with usage_errors(), progress_bar() as progress:
        report = run(options, progress)
        written = _write_cases(report, options.output)
    console = Console()
    for line in _lines(report, written):
        console.print(line, highlight=False, soft_wrap=True)
    if options.json is not None:
        with usage_errors():
            write_json(report.to_json(), options.json)
        console.print(f"written to {options.json}", highlight=False, markup=False, soft_wrap=True)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.is_green:
        raise typer.Exit(1)


def run(options: FuzzOptions, progress: Progress) -> FuzzReport:
    """Run what ``options`` ask for; raises a BcgError, before anything long, for what they ask wrongly.

    Ctrl-C ends the run, and the report says so.
    """
    require_folder(options.output)
    if options.json is not None:
        require_writable(options.json)
    checks = parse_checks(options.checks)
    buckets = None if options.buckets is None else parse_buckets(options.buckets)
    subject = Subject.choose(
        backends=options.backends,
        device=options.device,
        dtype=options.dtype,
        model=options.model,
        seed=options.seed,
        progress=progress,
    )
    candidates, model = subject.candidates, subject.resolved.model
    page_multiple = lcm(*(each.selected.capabilities.page_multiple for each in candidates))
    bounds = Bounds()
    # Long enough for two pages and a little, unless these are drawn much larger: what goes wrong does so at their ends.
    context = max(bounds.most_context, 2 * (options.page_size or page_multiple) + 32)
    plan = Plan(
        seed=options.seed,
        cases=options.cases,
        buckets=buckets,
        page_size=options.page_size,
        page_multiple=page_multiple,
        bounds=replace(bounds, most_context=min(context, model.spec.max_positions)),
    )
    fuzz = Fuzz(
        model,
        plan,
        candidates,
        subject.source,
        checks=checks,
        most_failures=options.max_failures,
        progress=progress,
    )
    tally = fuzz.tally
    for result in subject.others:
        if result.outcome is Outcome.SKIPPED:
            tally.skipped[result.backend, result.detail] += 1
        else:
            tally.errors.append(result)
    started, interrupted = perf_counter(), False
    try:
        fuzz.run()
    except KeyboardInterrupt:
        interrupted = True
    return FuzzReport(
        environment=Environment.of(model.spec.device),
        spec=model.spec,
        settings={
            "seed": options.seed,
            "backends": [candidate.label for candidate in candidates],
            "device": options.device,
            "model": options.model,
            "dtype": dtype_name(subject.dtype),
            "buckets": None if buckets is None else list(buckets),
            "page_size": options.page_size,
            "checks": list(checks),
        },
        tally=tally,
        planned=options.cases,
        seconds=perf_counter() - started,
        interrupted=interrupted,
    )


def parse_checks(text: str) -> tuple[str, ...]:
    """Read ``all``, ``mechanism`` or names of checks with commas between; raises HarnessError for others."""
    groups = {"all": CHECK_NAMES, "mechanism": MECHANISM}
    names = groups.get(text) or tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in CHECK_NAMES:
            raise HarnessError(
                f"no check {name!r}; possible are all, mechanism ({', '.join(MECHANISM)}), or some of "
                f"{', '.join(CHECK_NAMES)} with commas between"
            )
    return names


def _write_cases(report: FuzzReport, folder: Path) -> list[Path]:
    """Write each counter-example as a case of its own, with the command that replays it; returns the files."""
    written = []
    for found in report.tally.counterexamples:
        path = folder / f"{found.drawn.name}-{found.backend.partition('[')[0]}.json"
        case = replace(found.case, description=found.command(path, report.settings))
        write_json(case.to_json(), path)
        written.append(path)
    return written


def _lines(report: FuzzReport, written: list[Path]) -> Iterator[str]:
    """Yield what the command shows, as markup."""
    tally, settings = report.tally, report.settings
    yield escape(
        f"{report.environment} | {settings['model']} | {settings['dtype']} | seed {settings['seed']} | "
        f"checks {', '.join(settings['checks'])}"
    )
    for (backend, reason), times in tally.skipped.items():
        often = f" ({times} times)" if times > 1 else ""
        yield f"[yellow]skip[/] {escape(backend)}{often}: {escape(reason)}"
    for result in tally.errors:
        yield f"[bold red]ERROR[/] {escape(result.backend)}: {escape(result.detail)}"
    for found, path in zip(tally.counterexamples, written, strict=True):
        yield from _counterexample_lines(found, path, report)
    if tally.lost:
        yield f"[bold red]ended early:[/] {escape(tally.lost)}"
    for backend, passed in tally.passed.items():
        noun = "case" if passed == 1 else "cases"
        yield f"{escape(backend)}: [green]{passed} {noun} passed[/]"
    line = (
        f"{tally.finished} of {report.planned} cases finished, {tally.steps} batches checked, "
        f"{len(tally.counterexamples)} failed in {report.seconds:.1f} s ({report.cases_per_second:.1f} cases/s)"
    )
    yield line + (", interrupted" if report.interrupted else "")
    if not tally.passed:
        yield "[bold red]nothing was checked with success, so this run is not green[/]"


def _counterexample_lines(found: Counterexample, path: Path, report: FuzzReport) -> Iterator[str]:
    place = f"{found.drawn.name} with {found.backend}"
    yield f"[bold red]FAIL[/] {escape(place)}: {', '.join(found.checks)}: {escape(found.results[0].detail)}"
    steps = " then ".join(
        "+".join(f"{sequence}:{tokens}" for sequence, tokens in step.requests) or "nothing"
        for step in found.case.steps
    )
    yield f"  shrunk to {steps} (sequence:tokens), buckets {', '.join(map(str, found.buckets))}"
    if found.reproduced:
        yield f"  replay: {escape(found.command(path, report.settings))}"
    else:
        yield (
            f"  did not fail again on a fresh runner, so it is written as it was drawn ({escape(str(path))}); "
            "run again with the same seed to see it"
        )
