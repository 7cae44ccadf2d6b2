"""Define ``bcg bench``."""

from pathlib import Path
from typing import Annotated

import typer

from bcg_harness.bench.longer import Longer
from bcg_harness.cli.options import (
    Device,
    Dtype,
    LongerRequests,
    MaxRequests,
    PageSize,
    TokenBudget,
    Traces,
    refuse_nan,
)


def bench(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend to measure, all its variants or one as in 'flash_attn[version=3]', also with options of its "
            "constructor as in 'flashinfer[plans_in_flight=3]'; repeatable. Default: all.",
            metavar="NAME",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Execution mode: eager, eager_fused, padded_eager, breakable, breakable_unfused, full, "
            "compile_piecewise, transformers_eager or breakable_meta; repeatable. Default: the usual ones; eager is "
            "always measured, for comparison.",
            metavar="NAME",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="What to prefill: single-N, concurrent-BxN, chat-B, documents-B, turns-B or chunked-NxC, with numbers "
            "for B requests, N tokens, C tokens a chunk; repeatable. Default: a table of all kinds.",
            metavar="NAME",
        ),
    ] = None,
    trace: Traces = None,
    longer: LongerRequests = Longer.SKIP,
    device: Device = "cpu",
    model: Annotated[
        str,
        typer.Option(
            help="A built-in shape with random weights (tiny, smollm2-135m, llama-1b, llama-8b, ...), a Hugging Face "
            "directory, a .gguf file or a hub id.",
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
    token_budget: TokenBudget = 2048,
    max_requests: MaxRequests = 64,
    seconds: Annotated[
        float,
        typer.Option(
            help="About how long to repeat each mode on each workload.",
            min=0.0,
            max=86400.0,
            callback=refuse_nan,
            metavar="SECONDS",
        ),
    ] = 0.4,
    seed: Annotated[
        int,
        typer.Option(
            help="Of random weights, tokens and mixes.", min=0, max=2**63 - 1, metavar="N"
        ),
    ] = 0,
    profile: Annotated[
        bool,
        typer.Option(help="Also profile one pass of each mode: device time, launches, time line."),
    ] = True,
    bucket_costs: Annotated[
        bool,
        typer.Option("--bucket-costs", help="Also measure each bucket, which bcg tune needs."),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write all measures and their context here, for bcg report and bcg tune.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Measure how fast prefill is: execution modes side by side, over backends and workloads.

    Every result is compared with a reference before it is timed; what is wrong gets no time. Modes take turns, round by
    round, over the same batches, the same KV cache and, where they use one, the same backend. Exits with 0 if
    everything that was measured is right, with 1 if not, with 2 for wrong use, with 130 if interrupted.

    **Examples**

        bcg bench                                                the emulator, in a minute
        bcg bench --device cuda --model llama-1b --json out.json
        bcg bench --device cuda --backend flashinfer --workload single-256 --workload chat-32
        bcg bench --device cuda --trace requests.jsonl           your own traffic
        bcg bench --device cuda --trace AzureLLMInferenceTrace_conv.csv --longer cut
        bcg report out.json                                      the same with pictures
    """
    from bcg_harness.cli_bench import BenchOptions, bench_backends

    options = BenchOptions(
        backends=tuple(backend or ()),
        modes=tuple(mode or ()),
        workloads=tuple(workload or ()),
        traces=tuple(trace or ()),
        longer=longer,
        device=device,
        model=model,
        dtype=dtype,
        buckets=buckets,
        page_size=page_size,
        token_budget=token_budget,
        max_requests=max_requests,
        seconds=seconds,
        seed=seed,
        profile=profile,
        bucket_costs=bucket_costs,
        json=json,
    )
    bench_backends(options)
