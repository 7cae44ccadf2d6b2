"""Define ``bcg soak``."""

from pathlib import Path
from typing import Annotated

import typer

from bcg_harness.cli.options import BackendsToCheck, Device, Dtype, PageSize


def soak(
    replays: Annotated[
        int,
        typer.Option(
            help="Batches to serve by replay; those that fit no bucket come on top.",
            min=1,
            metavar="N",
        ),
    ] = 20_000,
    samples: Annotated[
        int | None,
        typer.Option(
            help="How often to read what must not grow, 10 to 200 times. Default: 200, or one a replay in shorter "
            "runs.",
            metavar="N",
        ),
    ] = None,
    check_every: Annotated[
        int,
        typer.Option(help="Compare every Nth batch with padded eager.", min=1, metavar="N"),
    ] = 100,
    seed: Annotated[
        int,
        typer.Option(
            help="Of everything that is drawn, weights and tokens too.",
            min=0,
            max=2**63 - 1,
            metavar="N",
        ),
    ] = 0,
    backend: BackendsToCheck = None,
    device: Device = "cpu",
    model: Annotated[
        str,
        typer.Option(
            help="A built-in shape with random weights, a Hugging Face directory, a .gguf file or a hub id.",
            metavar="MODEL",
        ),
    ] = "tiny",
    dtype: Dtype = None,
    buckets: Annotated[
        str | None,
        typer.Option(
            help="Token counts to capture, ascending, or a ladder that bcg tune wrote. Default: up to 2048 on cuda, "
            "16,64,256 on cpu.",
            metavar="N,N,...|FILE.json",
        ),
    ] = None,
    page_size: PageSize = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all readings and their whole context here.", metavar="FILE"),
    ] = None,
) -> None:
    """Serve random batches for long on one capture, and show that nothing grows and results stay right.

    Requests begin, go on behind cached tokens and end, so pages come and go; backends take turns at random. Device
    memory, pinned memory, host memory, tensors, Python's objects and open files are read at quiet points: no sequence
    is alive, and every backend has just served the same small batches. Exits with 0 only if nothing grew after the
    first fifth and every checked batch was right, with 1 if not, with 2 for wrong use, with 130 if interrupted.

    **Examples**

        bcg soak --replays 2000                          all backends, emulated, in a minute or two
        bcg soak --device cuda --model llama-1b --json soak.json
        bcg soak --device cuda --backend flashinfer --check-every 20
    """
    from bcg_harness.cli_soak import SoakOptions, soak_backends

    options = SoakOptions(
        replays=replays,
        samples=samples,
        check_every=check_every,
        seed=seed,
        backends=tuple(backend or ()),
        device=device,
        model=model,
        dtype=dtype,
        buckets=buckets,
        page_size=page_size,
        json=json,
    )
    soak_backends(options)
