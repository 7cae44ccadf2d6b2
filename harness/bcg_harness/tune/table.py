"""What ``bcg tune`` shows."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bcg_harness.bench.spread import Speedup, Verdict
from bcg_harness.tune.proposal import Proposal

_MIB = 2**20
_OVER = {
    "max_buckets": "too many buckets",
    "capture_seconds": "start-up takes too long",
    "memory_bytes": "too much graph memory",
}


def batches_line(proposal: Proposal) -> str:
    """Return in one line what is to be served."""
    distribution = proposal.distribution
    return (
        f"{_counted(distribution.batches, 'batch', 'es')}, "
        f"{_counted(len(distribution.tokens_n), 'different token count')}, {distribution.mean:.1f} tokens on average, "
        f"{distribution.largest} at most"
    )


def ladder_table(proposal: Proposal) -> Table:
    """Return a table of all ladders."""
    table = Table(
        title="what to expect of each ladder",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        collapse_padding=False,
        caption="latency: of a batch on average; ~: too close to call; padding: of rows; eager: of batches",
        caption_justify="left",
    )
    table.add_column("ladder", no_wrap=True)
    measures = ("latency\nms", "times as fast\nas default", "padding", "eager")
    for name in ("buckets", *measures, "capture\ns", "graphs\nMiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in proposal.rows.items():
        compared = "" if row is proposal.default else _speedup(proposal.speedup(row))
        table.add_row(
            name,
            str(len(row.ladder)),
            f"{1e3 * row.latency.median:.3f}",
            compared,
            f"{row.padding:.1%}",
            f"{row.eager_share:.1%}",
            f"{row.capture_seconds:.2f}",
            f"{row.memory_bytes / _MIB:.1f}",
            style="bold" if row is proposal.proposed else None,
        )
    return table


def note_lines(proposal: Proposal) -> Iterator[str]:
    """Yield what a reader should know about the figures."""
    smallest, largest = proposal.costs.sizes[0], proposal.costs.sizes[-1]
    distribution = proposal.distribution
    below = distribution.share(distribution.tokens_n < smallest)
    beyond = distribution.share(distribution.tokens_n > largest)
    if below:
        yield (
            f"{below:.1%} of the batches have fewer tokens than the smallest measured bucket ({smallest}): what they "
            f"cost without a bucket is extrapolated, as if they had {smallest}"
        )
    if beyond:
        yield (
            f"{beyond:.1%} of the batches have more tokens than the largest measured bucket ({largest}): they run "
            "eagerly with every ladder, at an extrapolated cost"
        )
    for name, row in proposal.rows.items():
        if over := row.over(proposal.budgets):
            yield f"{name}: over budget: {' and '.join(_OVER[budget] for budget in over)}"
        for sizes, how in (
            (
                [size for size in row.interpolated if size > smallest],
                "interpolated between measured",
            ),
            ([size for size in row.interpolated if size < smallest], "extrapolated from larger"),
        ):
            if sizes:
                some = f"{len(sizes)} of {_counted(len(row.ladder), 'bucket')}"
                yield f"{name}: costs of {some} are {how} ones"


def proposal_line(proposal: Proposal) -> str:
    """Return the proposed ladder, as ``--buckets`` takes it."""
    ladder = proposal.proposed.ladder
    if not ladder:
        within = " within these budgets" if proposal.budgets.limited else ""
        return f"no ladder{within} is faster than eager prefill"
    return f"buckets: {','.join(map(str, ladder))}"


def _speedup(speedup: Speedup) -> str:
    close = "~" if speedup.verdict is Verdict.TOO_CLOSE else ""
    return f"{close}{speedup.ratio:.2f}"


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
