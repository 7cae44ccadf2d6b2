"""The ``bcg`` command. Nothing heavy is imported before a subcommand runs, so that help is quick."""

import os
from math import isnan
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
    str,
    typer.Option(
        help="Token counts to capture, ascending, or a ladder that bcg tune wrote.",
        metavar="N,N,...|FILE.json",
    ),
]
BackendsToCheck = Annotated[
    list[str] | None,
    typer.Option(
        help="Backend to check, all its variants or one as in 'flash_attn[version=3]'; repeatable. Default: all.",
        metavar="NAME",
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
MaxRequests = Annotated[
    int, typer.Option(help="Most requests of a batch in traces.", min=1, metavar="N")
]


def _no_nan(seconds: float) -> float:
    if isnan(seconds):  # lies within every range, for it compares with nothing
        raise typer.BadParameter("nan is no time")
    return seconds


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
    """Breakable CUDA graphs for Llama prefill: prove attention backends right, and measure what they gain."""


@app.command()
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
        debug=debug,
    )
    check_backends(options)


@app.command()
def bench(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Backend to measure, all its variants or one as in 'flash_attn[version=3]'; repeatable. Default: all.",
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
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help='Requests to prefill, a JSON object a line: {"prompt_tokens": 300, "prefix_tokens": 0, '
            '"arrival_seconds": 0.5}; repeatable.',
            metavar="FILE.jsonl",
        ),
    ] = None,
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
            callback=_no_nan,
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
        bcg report out.json                                      the same with pictures
    """
    from bcg_harness.cli_bench import BenchOptions, bench_backends

    options = BenchOptions(
        backends=tuple(backend or ()),
        modes=tuple(mode or ()),
        workloads=tuple(workload or ()),
        traces=tuple(trace or ()),
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


@app.command()
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
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Requests to serve, as for bcg bench; they are packed into batches. Repeatable.",
            metavar="FILE.jsonl",
        ),
    ] = None,
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


@app.command()
def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results of bcg bench --json.", metavar="FILE...", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the page here. Default: beside the first file, under its name.",
            metavar="FILE.html",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Write a picture of each chart into this folder, for day and for night. Default: PAGE-charts.",
            metavar="DIR",
        ),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Leave the pictures out.")
    ] = True,
) -> None:
    """Make one HTML page, which needs no network, and pictures out of results of bcg bench.

    Several runs share the page. Each is compared with the one before it of the same model on the same hardware, on the
    page and here: which medians moved by more than 5 %. Needs the extra `report`.

    **Examples**

        bcg report out.json                            out.html and out-charts/
        bcg report before.json after.json              both, and what moved between them
        bcg report out.json --output page.html --no-pictures
    """
    from bcg_harness.cli_report import ReportOptions, write_report

    write_report(ReportOptions(files=tuple(files), output=output, png=png, pictures=pictures))


@app.command()
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
        Path, typer.Option(help="Write failing cases into this folder.", metavar="DIR")
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


@app.command()
def new_backend(
    name: Annotated[
        str,
        typer.Argument(
            help="Of the distribution and of the backend, such as my-kernel.", show_default=False
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            help="New or empty folder to write to. Default: one of that name, here.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Write a small plug-in that registers a backend, to be edited.

    It attends with torch's SDPA, and passes all checks as it is.

    **Examples**

        bcg new-backend my-kernel
        pip install -e './my-kernel[test]'
        bcg check --backend my-kernel
    """
    from bcg_harness.cli_new_backend import new_backend

    new_backend(name, directory)


def main() -> None:
    """Run the command."""
    # Idle OpenMP threads spin by default. On a machine with other work each barrier of a small tensor operation then
    # waits for a time slice, which makes a tiny model ten times slower. Read when torch is imported, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
