"""Define ``bcg check``."""

from pathlib import Path
from typing import Annotated

import typer

from bcg_harness.cli.options import BUCKETS, BackendsToCheck, Buckets, Device, Dtype, PageSize


def check(
    backend: BackendsToCheck = None,
    device: Device = "cpu",
    model: Annotated[
        str,
        typer.Option(
            help="A built-in shape with random weights (tiny, llama-1b, ...), a Hugging Face directory, a .gguf file "
            "or a hub id.",
            metavar="MODEL",
        ),
    ] = "tiny",
    dtype: Dtype = None,
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
    page_size: PageSize = None,
    seed: Annotated[
        int, typer.Option(help="Of random weights and tokens.", min=0, max=2**63 - 1, metavar="N")
    ] = 0,
    json: Annotated[
        Path | None,
        typer.Option(help="Write results and their whole context here.", metavar="FILE"),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Watch captures and replays with every tool of bcg_core.debug: replaced weights, hidden outputs of "
            "breaks, leaking padding, stray KV writes, streams, waits.",
        ),
    ] = False,
) -> None:
    """Check attention backends under breakable graphs: replay against eager, and against independent references.

    Captures the model once, then runs every case with every backend. Exits with 0 only if something was checked and
    nothing failed but what the backend declares (`expected_failures`), with 1 if a check failed or could not be judged,
    with 2 for wrong use, with 130 if interrupted.

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
        debug=debug,
    )
    check_backends(options)
