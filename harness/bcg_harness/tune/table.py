"""What ``bcg tune`` shows."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bcg_harness.bench.spread import Speedup, Verdict
from bcg_harness.tune.proposal import Proposal

_MIB = 2**20


def batches_line(proposal: Proposal) -> str:
    """Return in one line what is to be served."""
    distribution = proposal.distribution
    return (
        f"{distribution.batches} batches, {len(distribution.tokens_n)} different token counts, {distribution.mean:.1f} "
        f"tokens on average, {distribution.largest} at most"
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
    largest = proposal.costs.sizes[-1]
    distribution = proposal.distribution
    beyond = distribution.weights_n[distribution.tokens_n > largest].sum() / distribution.weight
    if beyond:
        yield (
            f"{beyond:.1%} of the batches have more tokens than the largest measured bucket ({largest}): they run "
            "eagerly with every ladder, at an extrapolated cost"
        )
    for name, row in proposal.rows.items():
        if row.over(proposal.budgets):
            yield f"{name}: over budget"
        if row.interpolated:
            some = f"{len(row.interpolated)} of {len(row.ladder)} buckets"
            yield f"{name}: costs of {some} are interpolated between measured ones"


def proposal_line(proposal: Proposal) -> str:
    """Return the proposed ladder, as ``--buckets`` takes it."""
    ladder = proposal.proposed.ladder
    if not ladder:
        return "no ladder within these budgets is faster than eager prefill"
    return f"buckets: {','.join(map(str, ladder))}"


def _speedup(speedup: Speedup) -> str:
    close = "~" if speedup.verdict is Verdict.TOO_CLOSE else ""
    return f"{close}{speedup.ratio:.2f}"
