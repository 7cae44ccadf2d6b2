"""``bcg cases``: list the built-in cases."""

import json

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bcg_harness.builtin import builtin_cases
from bcg_harness.cases import Case, Step
from bcg_harness.cli_errors import usage_errors
from bcg_harness.selection import parse_buckets


def print_cases(buckets: str, *, page_size: int, as_json: bool) -> None:
    """Print the cases for ``buckets`` and ``page_size`` as a table, or as JSON that ``--case`` reads."""
    with usage_errors():
        cases = builtin_cases(parse_buckets(buckets), page_size=page_size)
    if as_json:
        typer.echo(json.dumps([case.to_json() for case in cases], indent=1))
        return
    table = Table("case", "tokens of each step", "finds")
    for case in cases:
        table.add_row(escape(case.name), _steps(case), escape(case.description))
    Console().print(table)


def _steps(case: Case) -> str:
    return "; ".join(_tokens(step) for step in case.steps)


def _tokens(step: Step) -> str:
    counts = [tokens for _, tokens in step.requests]
    if len(counts) > 4 and len(set(counts)) == 1:
        text = f"{len(counts)} x {counts[0]}"
    elif len(counts) > 8:
        text = f"{step.num_tokens} in {len(counts)} requests"
    else:
        text = "+".join(map(str, counts)) or "none"
    return text if step.checked else f"({text})"
