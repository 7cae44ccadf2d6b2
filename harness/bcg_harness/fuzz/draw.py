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
        most_context: tokens of a request, its prefix included.
    """

    most_bucket: int = 48
    most_buckets: int = 4
    most_steps: int = 5
    most_requests: int = 8
    most_context: int = 160

    def __post_init__(self) -> None:
        for name, bound in vars(self).items():
            if bound < 1:
                raise HarnessError(f"{name} is {bound}, but nothing can be drawn below 1")


PAGE_FACTORS = (1, 2, 3, 8, 16)
"""Page sizes to draw from, as multiples of the smallest that all backends take."""


def draw_ladder(random: Random, bounds: Bounds) -> TokenBuckets:
    """Return a ladder of a few buckets, neighbours and far ones alike."""
    count = random.randint(1, min(bounds.most_buckets, bounds.most_bucket))
    return TokenBuckets(sorted(random.sample(range(1, bounds.most_bucket + 1), count)))


def draw_case(random: Random, name: str, buckets: Sequence[int], bounds: Bounds) -> Case:
    """Return a case of a few batches. From a small pool of sequences, so that many go on behind cached tokens."""
    pool = random.choice((1, 2, 3, bounds.most_requests, bounds.most_requests + 4))
    lengths: dict[int, int] = {}
    steps = []
    for _ in range(random.randint(1, bounds.most_steps)):
        requests = _requests(random, pool, lengths, buckets, bounds)
        for sequence, tokens in requests:
            lengths[sequence] = lengths.get(sequence, 0) + tokens
        steps.append(Step(requests=requests, checked=random.random() < 0.85))
    # The last step is always checked: what the earlier ones left behind has to show somewhere.
    steps[-1] = replace(steps[-1], checked=True)
    return Case(name=name, description="drawn at random", steps=tuple(steps))


def _requests(
    random: Random, pool: int, lengths: dict[int, int], buckets: Sequence[int], bounds: Bounds
) -> tuple[tuple[int, int], ...]:
    """Return a batch: a number of tokens, cut at random places, for sequences in random order."""
    if random.random() < 0.03:
        return ()
    total = _tokens(random, buckets)
    most = min(total, pool, bounds.most_requests)
    count = random.choice((1, min(2, most), random.randint(1, most), most))
    cuts = sorted(random.sample(range(1, total), count - 1))
    counts = [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
    sequences = random.sample(range(pool), count)
    return tuple(
        (sequence, tokens)
        for sequence, tokens in zip(sequences, counts, strict=True)
        if lengths.get(sequence, 0) + tokens <= bounds.most_context
    )


def _tokens(random: Random, buckets: Sequence[int]) -> int:
    """Return R of a batch: the edges of buckets most of all, then anything up to a little above the largest."""
    edge = random.choice(buckets) + random.choice((-1, 0, 1))
    few, anything = random.randint(1, 4), random.randint(1, buckets[-1])
    above = buckets[-1] + random.randint(1, max(1, buckets[-1] // 4))
    (total,) = random.choices((edge, few, anything, above), weights=(4, 2, 4, 1))
    return max(1, total)
