"""Draw compositions and ladders; the same random numbers give the same draw."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from bcg_core import TokenBuckets
from bcg_harness.cases import Case, Step
from bcg_harness.errors import HarnessError


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bound what is drawn: small, because what goes wrong goes wrong in small compositions too.

    Attributes:
        most_bucket: tokens of the largest bucket of a random ladder.
        most_buckets: buckets of a random ladder.
        most_steps: batches of a case.
        most_requests: requests of a batch.
        most_crowd: requests of a batch in the few cases that have many.
        most_context: tokens of a request, its prefix included.
    """

    most_bucket: int = 48
    most_buckets: int = 4
    most_steps: int = 5
    most_requests: int = 8
    most_crowd: int = 64
    most_context: int = 160

    def __post_init__(self) -> None:
        for name, bound in vars(self).items():
            if bound < 1:
                raise HarnessError(f"{name} is {bound}, but nothing can be drawn below 1")


PAGE_FACTORS = (1, 2, 3, 8, 16)
"""Page sizes to draw from, as multiples of the smallest that all backends take."""

_CROWD_SLOTS = 2**14
"""KV slots that a crowd may take with a page each: where pages are large, crowds are smaller."""


def draw_ladder(random: Random, bounds: Bounds) -> TokenBuckets:
    """Return a ladder of a few buckets, neighbours and far ones alike."""
    count = random.randint(1, min(bounds.most_buckets, bounds.most_bucket))
    return TokenBuckets(sorted(random.sample(range(1, bounds.most_bucket + 1), count)))


def draw_case(
    random: Random, name: str, buckets: Sequence[int], bounds: Bounds, page_size: int
) -> Case:
    """Return a case of a few batches. From a small pool of sequences, so that many go on behind cached tokens."""
    pool = random.choice((1, 2, 3, bounds.most_requests, bounds.most_requests + 4))
    crowd = min(bounds.most_crowd, _CROWD_SLOTS // page_size)
    if random.random() < 1 / 12 and crowd > bounds.most_requests:
        pool, bounds = crowd, replace(bounds, most_requests=crowd)
        # As if there were a bucket for all of them, or few would ever come together.
        buckets = sorted({*buckets, max(crowd, *buckets)})
    lengths: dict[int, int] = {}
    steps = []
    begins_at_edges = random.random() < 1 / 6
    for number in range(random.randint(1, bounds.most_steps)):
        begins = number == 0 and begins_at_edges
        requests = _near_page_edges(random, pool, bounds, page_size) if begins else ()
        requests = requests or draw_requests(random, pool, lengths, buckets, bounds, page_size)
        for sequence, tokens in requests:
            lengths[sequence] = lengths.get(sequence, 0) + tokens
        steps.append(Step(requests=requests, checked=random.random() < 0.85))
    # The last step is always checked: what the earlier ones left behind has to show somewhere.
    steps[-1] = replace(steps[-1], checked=True)
    return Case(name=name, description="drawn at random", steps=tuple(steps))


def draw_requests(
    random: Random,
    pool: int,
    lengths: dict[int, int],
    buckets: Sequence[int],
    bounds: Bounds,
    page_size: int | None = None,
) -> tuple[tuple[int, int], ...]:
    """Return a batch: a number of tokens, cut at random places, for sequences in random order.

    Sequences are numbers below ``pool``; ``lengths`` says how many tokens each has by now, none where it says nothing.
    Now and then those with cached tokens get one more, as in decoding, or, given a ``page_size``, all end where a page
    does.
    """
    if random.random() < 0.03:
        return ()
    total = _tokens(random, buckets)
    most = min(total, pool, bounds.most_requests)
    count = random.choice((1, min(2, most), random.randint(1, most), most))
    cuts = sorted(random.sample(range(1, total), count - 1))
    counts = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    requests = list(zip(random.sample(range(pool), count), counts, strict=True))
    kind = random.random()
    if kind < 1 / 8:
        requests = [
            (sequence, 1 if sequence in lengths and random.random() < 0.6 else tokens)
            for sequence, tokens in requests
        ]
    elif kind < 1 / 3 and page_size is not None:
        requests = [
            (sequence, _to_page_edge(random, lengths.get(sequence, 0), tokens, page_size))
            for sequence, tokens in requests
        ]
    return tuple(
        (sequence, tokens)
        for sequence, tokens in requests
        if lengths.get(sequence, 0) + tokens <= bounds.most_context
    )


def _near_page_edges(
    random: Random, pool: int, bounds: Bounds, page_size: int
) -> tuple[tuple[int, int], ...]:
    """Return a batch of one or two requests that end where a page does or a few tokens before it, if there is room."""
    ends = [random.randint(1, 2) * page_size - random.randint(-1, 4) for _ in range(min(2, pool))]
    return tuple(
        (sequence, end) for sequence, end in enumerate(ends) if 0 < end <= bounds.most_context
    )


def _to_page_edge(random: Random, length: int, tokens: int, page_size: int) -> int:
    """Return how many tokens behind ``length`` end at the page's end that is nearest to ``tokens``, or beside it."""
    pages = round((length + tokens) / page_size)
    edge = pages * page_size + random.choice((-1, 0, 1))
    return edge - length if pages and edge > length else tokens


def _tokens(random: Random, buckets: Sequence[int]) -> int:
    """Return R of a batch: the edges of buckets most of all, then anything up to a little above the largest."""
    edge = random.choice(buckets) + random.choice((-1, 0, 1))
    few, anything = random.randint(1, 4), random.randint(1, buckets[-1])
    above = buckets[-1] + random.randint(1, max(1, buckets[-1] // 4))
    (total,) = random.choices((edge, few, anything, above), weights=(4, 2, 4, 1))
    return max(1, total)
