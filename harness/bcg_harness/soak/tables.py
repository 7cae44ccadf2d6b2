"""What the command shows of a soak, as markup and tables for people."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from bcg_harness.outcome import Outcome
from bcg_harness.soak.record import SoakReport
from bcg_harness.soak.samples import Growth

_MOST_TYPES = 5


def context_line(report: SoakReport) -> str:
    """Return in one line what was run on what."""
    settings, buckets = report.settings, report.buckets
    return (
        f"{report.environment} | {settings['model']} | {settings['dtype']} | seed {settings['seed']} | "
        f"{len(buckets)} buckets from {buckets[0]} to {buckets[-1]} tokens, pages of {settings['page_size']}"
    )


def growth_table(report: SoakReport) -> Table | None:
    """Return a row for each quantity; None when too little was read to say anything."""
    growths = report.samples.growths()
    if not growths:
        return None
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        collapse_padding=False,
        caption="highest readings of the first and of the last quarter after settling",
        caption_justify="left",
    )
    table.add_column("quantity", overflow="fold")
    for column in ("settled", "end", "growth", "allowed", "verdict"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in growths:
        table.add_row(
            each.quantity.name,
            _amount(each, each.start),
            _amount(each, each.end),
            f"{each.growth:+,}",
            f"{each.quantity.allowed:,}",
            "[green]ok[/]" if each.within else "[bold red]GROWS[/]",
        )
    return table


def _amount(growth: Growth, value: int) -> str:
    return f"{value / 2**20:,.1f} MiB" if growth.quantity.in_bytes else f"{value:,}"


def lines(report: SoakReport) -> Iterator[str]:
    """Yield everything but the table, as markup; the last line sums up."""
    tally = report.tally
    for result in tally.unusable:
        word = "[yellow]skip[/]" if result.outcome is Outcome.SKIPPED else "[bold red]ERROR[/]"
        yield f"{word} {escape(result.backend)}: {escape(result.detail)}"
    for reason in dict.fromkeys(report.missing.values()):
        names = "; ".join(name for name, why in report.missing.items() if why == reason)
        yield f"[yellow]not watched[/], as {escape(reason)}: {names}"
    if tally.failure is not None:
        for result in tally.failure.results:
            check = f"{result.check}: " if result.check else ""
            yield (
                f"[bold red]{'FAIL' if result.check else 'ERROR'}[/] batch {tally.failure.batch} with "
                f"{escape(result.backend)}, after {tally.failure.replays} replays: {check}{escape(result.detail)}"
            )
    if tally.grown and not all(growth.within for growth in report.samples.growths()):
        most = ", ".join(
            f"{count:,} {name}" for name, count in tally.grown.most_common(_MOST_TYPES)
        )
        yield f"Python holds more than after settling: {escape(most)}"
    for backend, turns in tally.turns.items():
        yield f"{escape(backend)}: {turns:,} batches, {tally.checked[backend]:,} of them checked"
    used = {size: tally.buckets[size] for size in report.buckets if tally.buckets[size]}
    if used:
        yield (
            f"{len(used)} of {len(report.buckets)} buckets used: "
            + ", ".join(f"{size}: {times:,}" for size, times in used.items())
        )
    for reason, times in report.fallbacks.items():
        yield f"eager: {times:,} batches: {escape(reason)}"
    yield _summary(report)


def _summary(report: SoakReport) -> str:
    tally = report.tally
    line = (
        f"{tally.replays:,} replays, {report.planned:,} asked for, in {tally.batches:,} batches of "
        f"{tally.sequences:,} sequences in {report.seconds:.1f} s ({report.replays_per_second:.1f} replays/s)"
    )
    if report.interrupted:
        line += ", interrupted"
    if not report.samples.growths():
        line += ": [bold red]too little was read after settling to say whether anything grows[/]"
    elif report.is_green:
        line += ": [green]nothing grows, and all that was checked is right[/]"
    return line
