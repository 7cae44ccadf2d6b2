"""What the command shows: tables for people, on a terminal or in a log."""

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bcg_harness.checks import CHECK_NAMES
from bcg_harness.environment import describe_model, dtype_name, model_shape
from bcg_harness.outcome import CheckResult, Outcome, tally
from bcg_harness.report import CheckReport

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "yellow",
    Outcome.XFAILED: "yellow",
    Outcome.ERROR: "bold red",
}
_WORDS = {
    Outcome.PASSED: "ok",
    Outcome.FAILED: "FAIL",
    Outcome.SKIPPED: "skip",
    Outcome.XFAILED: "xfail",
    Outcome.ERROR: "ERROR",
}
_GRAVITY = (Outcome.ERROR, Outcome.FAILED, Outcome.XFAILED, Outcome.SKIPPED, Outcome.PASSED)
_MOST_PROBLEMS = 20
_HEADERS = {
    "attention": "atten-\ntion",
    "structure": "struc-\nture",
    "kv_isolation": "kv iso-\nlation",
    "padding": "pad-\nding",
    "interleaved": "inter-\nleaved",
}
"""Checks whose names would take the room that those of cases need in 80 columns."""


def context_line(report: CheckReport) -> str:
    """Return in one line what was run on what."""
    spec = report.spec
    shape = model_shape(describe_model(spec))
    buckets = ", ".join(map(str, report.buckets))
    capture = f"buckets {buckets}, pages of {report.settings['page_size']}"
    if report.capture is not None:
        capture += ", captured once for all backends"
    if report.settings["debug"]:
        capture += ", watched by all debug tools"
    return f"{report.environment} | {report.model} ({shape}) | {dtype_name(spec.dtype)} | {capture}"


def check_table(report: CheckReport, backend: str) -> Table | None:
    """Return a table of ``backend``: a row for each case, a column for each check; None when it could not be used.

    A cell is the worst of all steps. A check that had nothing to judge in any case has no column.
    """
    results = [result for result in report.results if result.backend == backend and result.case]
    if not results:
        return None
    table = Table(
        title=f"backend {escape(backend)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
        collapse_padding=False,
        caption="numbers: largest error as a fraction of its budget; -: nothing to check",
        caption_justify="left",
    )
    table.add_column("case", overflow="fold")
    made = {result.check for result in results}
    checks = [check for check in CHECK_NAMES if check in made] or CHECK_NAMES
    for check in checks:
        header = _HEADERS.get(check, check.replace("_", "\n", 1))
        table.add_column(header, no_wrap=True, justify="right")
    for case in report.cases:
        of_case = [result for result in results if result.case == case.name]
        whole = [result for result in of_case if result.check is None]
        cells = [_cell([r for r in of_case if r.check == check] or whole) for check in checks]
        table.add_row(escape(case.name), *cells)
    return table


def summary_line(report: CheckReport) -> str:
    """Return counts of outcomes, as markup."""
    counts = tally(report.results)
    parts = [
        f"[{_STYLES[outcome]}]{counts[outcome]} {_counted(outcome, counts[outcome])}[/]"
        for outcome in Outcome
        if counts[outcome] or outcome in (Outcome.PASSED, Outcome.FAILED)
    ]
    line = f"{', '.join(parts)} in {report.seconds:.1f} s"
    if report.interrupted:
        line += f", interrupted after {report.finished} of {report.planned} cases"
    if not any(outcome.is_good for outcome in counts):
        line += ": [bold red]nothing was checked with success, so this run is not green[/]"
    return line


def _counted(outcome: Outcome, count: int) -> str:
    if outcome is Outcome.XFAILED:
        return "failed as expected"
    return "errors" if outcome is Outcome.ERROR and count > 1 else outcome.value


def problem_lines(report: CheckReport) -> Iterator[str]:
    """Yield what failed, step by step, why what was skipped or failed as expected did, and warnings, as markup."""
    bad = [result for result in report.results if result.outcome.is_bad]
    for result in bad[:_MOST_PROBLEMS]:
        word = _WORDS[result.outcome]
        yield f"[bold red]{word}[/] {escape(_place(result))}: {escape(result.detail)}"
    if len(bad) > _MOST_PROBLEMS:
        yield f"... and {len(bad) - _MOST_PROBLEMS} more (--json lists all)"
    reasons = Counter(
        (result.outcome, result.backend, result.expected or result.detail)
        for result in report.results
        if result.outcome in (Outcome.SKIPPED, Outcome.XFAILED)
    )
    for (outcome, backend, reason), count in reasons.items():
        times = f" ({count} times)" if count > 1 else ""
        word = f"[{_STYLES[outcome]}]{_WORDS[outcome]}[/]"
        yield f"{word} {escape(backend)}{times}: {escape(reason)}"
    for warning in report.warnings:
        yield f"[yellow]warning[/] {escape(warning)}"


def _place(result: CheckResult) -> str:
    parts = [result.backend]
    if result.case is not None:
        parts.append(result.case)
    if result.step is not None:
        parts.append(f"step {result.step}")
    if result.check is not None:
        parts.append(result.check)
    return " / ".join(parts)


def _cell(results: Iterable[CheckResult]) -> str:
    results = list(results)
    if not results:
        return "[dim]-[/]"
    outcome = next(o for o in _GRAVITY if any(result.outcome is o for result in results))
    loads = [result.load for result in results if result.load is not None]
    passed_with = f"{max(loads):.2f}" if loads and outcome is Outcome.PASSED else None
    return f"[{_STYLES[outcome]}]{passed_with or _WORDS[outcome]}[/]"
