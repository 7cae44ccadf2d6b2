"""The ``bcg`` command. Nothing heavy is imported before a subcommand runs, so that help is quick."""

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="bcg",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

BUCKETS = "16,64,256"

Buckets = Annotated[
    str, typer.Option(help="Token counts to capture, ascending.", metavar="N,N,...")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"bcg {version('breakable-cuda-graph')}")
        raise typer.Exit


@app.callback()
def bcg(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Breakable CUDA graphs for Llama prefill: prove attention backends right."""


@app.command()
def check(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend to check, all its variants or one as in 'flash_attn[version=3]'; repeatable. Default: all.",
            metavar="NAME",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu (emulated graphs) or cuda.", metavar="NAME")
    ] = "cpu",
    model: Annotated[
        str,
        typer.Option(
            help="A built-in shape with random weights (tiny, llama-1b, ...), a Hugging Face directory, a .gguf file "
            "or a hub id.",
            metavar="MODEL",
        ),
    ] = "tiny",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. Default: float32 on cpu, bfloat16 on cuda.",
            metavar="NAME",
        ),
    ] = None,
    buckets: Buckets = BUCKETS,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="Case to run, by name or from a .json file; repeatable. Default: all.",
            metavar="NAME|FILE.json",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Prefill this text instead of random tokens.", metavar="FILE"),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens a KV page. Default: the smallest that all selected backends read in place.",
            min=1,
            metavar="N",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of random weights and tokens.", min=0, max=2**63 - 1, metavar="N")
    ] = 0,
    json: Annotated[
        Path | None,
        typer.Option(help="Write results and their whole context here.", metavar="FILE"),
    ] = None,
) -> None:
    """Check attention backends under breakable graphs: replay against eager, and against independent references.

    Captures the model once, then runs every case with every backend. Exits with 0 only if something was checked and
    everything passed, with 1 if a check failed or could not be judged, with 2 for wrong use, with 130 if interrupted.

    **Examples**

        bcg check                                        all backends, tiny model
        bcg check --device cuda --dtype float16          real CUDA graphs
        bcg check --backend sdpa --case two-requests     one backend, one case
        bcg check --case mine.json                       a case of your own
        bcg check --model m.gguf --text README.md        a real checkpoint and text
        bcg check --model llama-1b --json out.json       keep the results
    """
    from bcg_harness.cli_check import CheckOptions, check_backends

    options = CheckOptions(
        backends=tuple(backend or ()),
        device=device,
        model=model,
        dtype=dtype,
        buckets=buckets,
        cases=tuple(case or ()),
        text=text,
        page_size=page_size,
        seed=seed,
        json=json,
    )
    check_backends(options)


@app.command()
def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the registered attention backends: what each can do, or what is missing to run it."""
    from bcg_harness.cli_backends import print_backends

    print_backends(as_json=as_json)


@app.command()
def cases(
    buckets: Buckets = BUCKETS,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON that --case can read from a file.")
    ] = False,
) -> None:
    """List the built-in cases, as they are for these buckets."""
    from bcg_harness.cli_cases import print_cases

    print_cases(buckets, as_json=as_json)


def main() -> None:
    """Run the command."""
    # Idle OpenMP threads spin by default. On a machine with other work each barrier of a small tensor operation then
    # waits for a time slice, which makes a tiny model ten times slower. Read when torch is imported, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
