"""Built-in cases in which every request is new: nothing is cached before its tokens."""

from bcg_harness.builtin.sizes import Sizes
from bcg_harness.cases import Case, Step


def one_request(sizes: Sizes) -> Case:
    """Fill most of a bucket."""
    return Case(
        name="one-request",
        description="one request that fills most of a bucket",
        steps=(sizes.batch(200),),
    )


def two_requests(sizes: Sizes) -> Case:
    """Put a boundary into the batch."""
    return Case(
        name="two-requests",
        description="as many tokens in two requests: attention must not cross the boundary",
        steps=(sizes.batch(80, 120),),
    )


def other_boundaries(sizes: Sizes) -> Case:
    """Move the boundary between replays of one bucket."""
    return Case(
        name="other-boundaries",
        description="the same bucket again with other boundaries: nothing of the first replay may be frozen",
        steps=(
            sizes.largest_bucket(200),
            sizes.largest_bucket(80, 120, first=1),
            sizes.largest_bucket(240, first=3),
        ),
    )


def around(sizes: Sizes, name: str, offset: int) -> Case:
    """Serve ``offset`` tokens more than buckets hold."""
    counts = [max(1, size + offset) for size in sizes.samples]
    what = {-1: "one token fewer than a bucket", 0: "exactly a bucket: no padded row"}
    return Case(
        name=name,
        description=what.get(offset, "one token more: the next bucket, or eager above the last"),
        steps=tuple(sizes.exactly(count, first=16 * i) for i, count in enumerate(counts)),
    )


def one_token(sizes: Sizes) -> Case:
    """Pad as much as possible."""
    return Case(
        name="one-token",
        description="a single token: all but one row of the smallest bucket are padding",
        steps=(Step(requests=((0, 1),)),),
    )


def one_token_requests(sizes: Sizes) -> Case:
    """Have as many requests as tokens."""
    count = sizes.scaled(64)
    return Case(
        name="one-token-each",
        description="many requests of one token each",
        steps=(Step(requests=tuple((i, 1) for i in range(count))),),
    )


def above_largest(sizes: Sizes) -> Case:
    """Exceed all buckets."""
    over = sizes.largest + sizes.scaled(44)
    first = max(1, over // 3)
    return Case(
        name="above-largest",
        description="more tokens than the largest bucket: eager, with the reason counted",
        steps=(Step(requests=((0, first), (1, over - first))),),
    )


def large_then_small(sizes: Sizes) -> Case:
    """Leave rows and requests behind for a smaller batch."""
    return Case(
        name="large-then-small",
        description="many requests, then few in the same bucket: no row of the first may be left",
        steps=(
            sizes.largest_bucket(*[8] * 32),
            sizes.largest_bucket(100, 50, first=32),
            sizes.largest_bucket(90, first=34),
        ),
    )


def bucket_order(sizes: Sizes) -> Case:
    """Walk over every ordered pair of buckets."""
    samples, order = sizes.samples, [0]
    for first in range(len(samples)):
        for second in range(first + 1, len(samples)):
            order += [second, first]
        if first + 1 < len(samples):
            order.append(first + 1)
    if len(samples) == 1:
        order = [0, 0, 0]
    counts = [max(1, samples[i] - max(1, samples[i] // 8)) for i in order]
    return Case(
        name="bucket-order",
        description="buckets replayed in every order (A, B, A)",
        steps=tuple(sizes.exactly(count, first=16 * i) for i, count in enumerate(counts)),
    )


def no_requests(sizes: Sizes) -> Case:
    """Serve nobody, then somebody."""
    return Case(
        name="no-requests",
        description="a batch without requests, and a normal one after it",
        steps=(Step(requests=()), sizes.batch(100)),
    )
