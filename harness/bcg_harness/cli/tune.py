"""Define ``bcg tune``."""

from pathlib import Path
from typing import Annotated

import typer

from bcg_harness.bench.longer import Longer
from bcg_harness.cli.options import LongerRequests, MaxRequests, TokenBudget, Traces


def tune(
    costs: Annotated[
        Path,
        typer.Option(
            help="Measured costs: what bcg bench --bucket-costs --json wrote.", metavar="FILE.json"
        ),
    ],
    lengths: Annotated[
        list[Path] | None,
        typer.Option(
            help="Batches to serve, one a line: its tokens and, if you like, its weight, as in '300 2.5'; repeatable.",
            metavar="FILE",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Batches to serve: those of a workload of bcg bench; repeatable.", metavar="NAME"
        ),
    ] = None,
    trace: Traces = None,
    longer: LongerRequests = Longer.SKIP,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Whose costs to take. Default: the only backend in the file.", metavar="NAME"
        ),
    ] = None,
    memory_budget: Annotated[
        float | None,
        typer.Option(help="Most graph memory, in MiB. Default: any.", min=0.0, metavar="MIB"),
    ] = None,
    start_up_budget: Annotated[
        float | None,
        typer.Option(
            help="Longest capture of all buckets, in seconds. Default: any.",
            min=0.0,
            metavar="SECONDS",
        ),
    ] = None,
    max_buckets: Annotated[
        int | None, typer.Option(help="Most buckets. Default: any.", min=1, metavar="N")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            help="Also consider multiples of N between measured buckets, at interpolated costs. Default: only what was "
            "measured.",
            min=1,
            metavar="N",
        ),
    ] = None,
    token_budget: TokenBudget = 2048,
    max_requests: MaxRequests = 64,
    seed: Annotated[int, typer.Option(help="Of mixes.", min=0, max=2**63 - 1, metavar="N")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the ladder here: --buckets takes the file, and so does TokenBuckets.load.",
            metavar="FILE.json",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all figures and their context here.", metavar="FILE"),
    ] = None,
) -> None:
    """Propose the bucket ladder with the least expected prefill latency for your batches, within budgets.

    Searches all ladders of the measured buckets exactly, and shows the best beside the default ladder, the best single
    bucket, and no graph at all. Exits with 0, with 1 if a ladder was to be written and eager prefill is faster than any
    within the budgets, with 2 for wrong use.

    **Examples**

        bcg bench --device cuda --bucket-costs --json costs.json     measure first
        bcg tune --costs costs.json --lengths lengths.txt
        bcg tune --costs costs.json --trace requests.jsonl --memory-budget 512 --start-up-budget 10
        bcg tune --costs costs.json --workload chat-64 --max-buckets 8 --output ladder.json
        bcg check --device cuda --buckets ladder.json                use it
    """
    from bcg_harness.cli_tune import TuneOptions, tune_ladder

    options = TuneOptions(
        costs=costs,
        backend=backend,
        lengths=tuple(lengths or ()),
        workloads=tuple(workload or ()),
        traces=tuple(trace or ()),
        longer=longer,
        token_budget=token_budget,
        max_requests=max_requests,
        seed=seed,
        memory_budget=memory_budget,
        start_up_budget=start_up_budget,
        max_buckets=max_buckets,
        step=step,
        output=output,
        json=json,
    )
    tune_ladder(options)
