"""``bcg soak``: serve random batches for long, and say whether anything grows."""

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import typer
from rich.console import Console

from bcg_core import negotiate_page_size
from bcg_harness.bench.defaults import default_ladder
from bcg_harness.cli_errors import INTERRUPTED, usage_errors
from bcg_harness.cli_progress import progress_bar
from bcg_harness.cli_subject import Subject
from bcg_harness.environment import Environment, dtype_name
from bcg_harness.json_file import require_writable, write_json
from bcg_harness.memory import has_to_fit
from bcg_harness.progress import Progress
from bcg_harness.selection import parse_buckets
from bcg_harness.soak.record import SoakReport
from bcg_harness.soak.samples import number_of_samples
from bcg_harness.soak.soak import Soak
from bcg_harness.soak.tables import context_line, growth_table, lines
from bcg_harness.soak.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """Hold the options of the command as they were given; ``bcg soak --help`` says what they mean."""

    replays: int = 20_000
    samples: int | None = None
    check_every: int = 100
    seed: int = 0
    backends: tuple[str, ...] = ()
    device: str = "cpu"
    model: str = "tiny"
    dtype: str | None = None
    buckets: str | None = None
    page_size: int | None = None
    json: Path | None = None


def soak_backends(options: SoakOptions) -> None:
    """Run what ``options`` ask for, print it, and exit: 0 if green, 1 if not, 2 for wrong use, 130 if interrupted."""
    with usage_errors(), progress_bar() as progress:
        report = run(options, progress)
    console = Console()
    console.print(context_line(report), highlight=False, markup=False, soft_wrap=True)
    table = growth_table(report)
    if table is not None:
        console.print(table)
    for line in lines(report):
        console.print(line, highlight=False, soft_wrap=True)
    if options.json is not None:
        with usage_errors():
            write_json(report.to_json(), options.json)
        console.print(f"written to {options.json}", highlight=False, markup=False, soft_wrap=True)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.is_green:
        raise typer.Exit(1)


def run(options: SoakOptions, progress: Progress) -> SoakReport:
    """Run what ``options`` ask for; raises a BcgError, before anything long, for what they ask wrongly.

    Ctrl-C ends the run, and the report says so.
    """
    if options.json is not None:
        require_writable(options.json)
    samples = number_of_samples(options.samples, options.replays)
    chosen = None if options.buckets is None else parse_buckets(options.buckets)
    subject = Subject.choose(
        backends=options.backends,
        device=options.device,
        dtype=options.dtype,
        model=options.model,
        seed=options.seed,
        progress=progress,
    )
    spec = subject.resolved.model.spec
    buckets = chosen or default_ladder(spec.device, spec.max_positions)
    page_size = options.page_size or negotiate_page_size(
        candidate.selected.capabilities for candidate in subject.candidates
    )
    with has_to_fit("the KV cache", hint="choose smaller --buckets or a smaller model"):
        soak = Soak(
            subject.resolved.model,
            Traffic.of(options.seed, buckets, spec.max_positions),
            subject.candidates,
            subject.source,
            replays=options.replays,
            samples=samples,
            check_every=options.check_every,
            page_size=page_size,
            progress=progress,
        )
    soak.tally.unusable += subject.others
    started, interrupted = perf_counter(), False
    try:
        soak.run()
    except KeyboardInterrupt:
        interrupted = True
    return SoakReport(
        environment=Environment.of(spec.device),
        spec=spec,
        settings={
            "replays": options.replays,
            "samples": samples,
            "check_every": options.check_every,
            "seed": options.seed,
            "backends": [candidate.label for candidate in subject.candidates],
            "device": options.device,
            "model": options.model,
            "dtype": dtype_name(subject.dtype),
            "page_size": page_size,
        },
        buckets=buckets,
        tally=soak.tally,
        fallbacks=dict(soak.runner.stats.fallbacks),
        samples=soak.samples,
        missing=soak.missing,
        planned=options.replays,
        seconds=perf_counter() - started,
        interrupted=interrupted,
    )
