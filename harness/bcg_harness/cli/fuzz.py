"""Define ``bcg fuzz``."""

from pathlib import Path
from typing import Annotated

import typer

from bcg_harness.cli.options import BackendsToCheck, Device, Dtype


def fuzz(
    cases: Annotated[int, typer.Option(help="Random cases to run.", min=1, metavar="N")] = 1000,
    seed: Annotated[
        int,
        typer.Option(
            help="Of everything that is drawn, weights and tokens too: case number i of a seed is always the same.",
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
            help="Token counts to capture. Default: another random ladder every 100 cases.",
            metavar="N,N,...|FILE.json",
        ),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(help="Tokens a KV page. Default: drawn with the ladder.", min=1, metavar="N"),
    ] = None,
    checks: Annotated[
        str,
        typer.Option(
            help="'all', 'mechanism' (replay against padded eager alone; several times as fast), or names of checks "
            "with commas between.",
            metavar="all|mechanism|NAME,...",
        ),
    ] = "all",
    max_failures: Annotated[
        int, typer.Option(help="Failures after which to stop.", min=1, metavar="N")
    ] = 1,
    output: Annotated[
        Path,
        typer.Option(
            help="Write failing cases into this folder, which is made if need be.", metavar="DIR"
        ),
    ] = Path(),
    json: Annotated[
        Path | None,
        typer.Option(help="Write the result and its whole context here.", metavar="FILE"),
    ] = None,
) -> None:
    """Check attention backends on random batch compositions: lengths, prefixes, chunks, ladders, page sizes.

    Backends take turns, case by case, on one capture of each ladder. What fails is tried again on a fresh runner, made
    as small as it goes, and written as a case that `bcg check --case` replays. Exits with 0 only if everything passed,
    with 1 if something failed, with 2 for wrong use, with 130 if interrupted.

    **Examples**

        bcg fuzz                                              1000 cases, all backends, emulated
        bcg fuzz --cases 10000 --checks mechanism             the long run, a few minutes
        bcg fuzz --device cuda --cases 2000 --seed 7
        bcg fuzz --backend mine --max-failures 5 --output failures
    """
    from bcg_harness.cli_fuzz import FuzzOptions, fuzz_backends

    options = FuzzOptions(
        cases=cases,
        seed=seed,
        backends=tuple(backend or ()),
        device=device,
        model=model,
        dtype=dtype,
        buckets=buckets,
        page_size=page_size,
        checks=checks,
        max_failures=max_failures,
        output=output,
        json=json,
    )
    fuzz_backends(options)
