"""Options that commands share, with what typer calls on their values."""

from math import isnan
from pathlib import Path
from typing import Annotated

import typer

from bcg_harness.bench.longer import Longer

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
        help="Backend to check, all its variants or one as in 'flash_attn[version=3]', also with options of its "
        "constructor as in 'flashinfer[plans_in_flight=3]'; repeatable. Default: all.",
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
LongerRequests = Annotated[
    Longer,
    typer.Option(
        help="What becomes of requests of a trace that are longer than the model's context: leave them out, as a "
        "server does, keep their first tokens, or refuse the trace. The first two are counted."
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
Traces = Annotated[
    list[Path] | None,
    typer.Option(
        help="Requests to serve, as a server received them. Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens) and "
        "Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids) as they are published, or a JSON "
        'object a line: {"prompt_tokens": 300, "prefix_tokens": 0, "arrival_seconds": 0.5, "output_tokens": 20}; '
        "repeatable.",
        metavar="FILE",
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
