"""The ``bcg`` command: all subcommands, in the order of its help."""

import os

import typer

from bcg_harness.cli import backends, bench, cases, check, fuzz, new_backend, report, soak, tune
from bcg_harness.cli.options import Version

app = typer.Typer(
    name="bcg",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)


@app.callback()
def bcg(version: Version = False) -> None:
    """Breakable CUDA graphs for Llama prefill: prove attention backends right, and measure what they gain."""


app.command()(check.check)
app.command()(bench.bench)
app.command()(backends.backends)
app.command()(cases.cases)
app.command()(tune.tune)
app.command()(report.report)
app.command()(fuzz.fuzz)
app.command()(soak.soak)
app.command()(new_backend.new_backend)


def main() -> None:
    """Run the command."""
    # Idle OpenMP threads spin by default. On a machine with other work each barrier of a small tensor operation then
    # waits for a time slice, which makes a tiny model ten times slower. Read when torch is imported, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
