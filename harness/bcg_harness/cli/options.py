"""Options that commands share, with what typer calls on their values."""

from math import isnan
from typing import Annotated

import typer

BUCKETS = "16,64,256"


def refuse_nan(seconds: float) -> float:
    """Return ``seconds`` unless they are nan, which lies within every range: it compares with nothing."""
    if isnan(seconds):
        raise typer.BadParameter("nan is no time")
    return seconds


def print_version(wanted: bool) -> None:
    """Print the version and exit, if ``wanted``."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"bcg {version('breakable-cuda-graph')}")
        raise typer.Exit


BackendsToCheck = Annotated[
    list[str] | None,
    typer.Option(
        help="Backend to check, all its variants or one as in 'flash_attn[version=3]'; repeatable. Default: all.",
        metavar="NAME",
    ),
]
Buckets = Annotated[
    str,
    typer.Option(
        help="Token counts to capture, ascending, or a ladder that bcg tune wrote.",
        metavar="N,N,...|FILE.json",
    ),
]
Device = Annotated[str, typer.Option(help="cpu (emulated graphs) or cuda.", metavar="NAME")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16. Default: float32 on cpu, bfloat16 on cuda.",
        metavar="NAME",
    ),
]
MaxRequests = Annotated[
    int, typer.Option(help="Most requests of a batch in traces.", min=1, metavar="N")
]
PageSize = Annotated[
    int | None,
    typer.Option(
        help="Tokens a KV page. Default: the smallest that all selected backends read in place.",
        min=1,
        metavar="N",
    ),
]
TokenBudget = Annotated[
    int, typer.Option(help="Most new tokens of a batch in mixes and traces.", min=1, metavar="N")
]
Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Show the version and exit.", callback=print_version, is_eager=True
    ),
]
