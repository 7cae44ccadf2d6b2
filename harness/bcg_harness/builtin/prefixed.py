"""Built-in cases in which requests go on behind cached tokens."""

from bcg_harness.builtin.sizes import Sizes
from bcg_harness.cases import Case, Step

_MANY = 33
"""Requests: one more than powers of two at which kernels and their schedulers change."""

_FARTHEST = 2048
"""Tokens of the longest request: what is computed in high precision for comparison grows with their square."""


def edges_mixed(sizes: Sizes) -> Case:
    """Serve one token less, as many and one more than the largest bucket holds, half of them behind a prefix."""
    prefix, steps = sizes.prefix(37), []
    setup = Step(requests=tuple((i, prefix) for i in range(3)), checked=False)
    for number, offset in enumerate((-1, 0, 1)):
        total = max(2, sizes.largest + offset)
        alone = max(1, total // 3)
        steps.append(Step(requests=((number, total - alone), (number + 3, alone))))
    return Case(
        name="prefix-edges",
        description="bucket - 1, bucket and bucket + 1 tokens, split between a request with and one without prefix",
        steps=(setup, *steps),
    )


def edges_of_prefixed(sizes: Sizes) -> Case:
    """Do the same around every bucket, with nobody in the batch who has no prefix."""
    prefix = sizes.prefix(37)
    totals = {max(2, size + offset) for size in sizes.samples for offset in (-1, 0, 1)}
    setup: list[tuple[int, int]] = []
    steps = []
    for total in sorted(totals):
        parts = max(2, -(-total // max(1, sizes.max_context - prefix)))
        first = len(setup)
        setup += [(first + i, max(1, prefix - 11 * i)) for i in range(parts)]
        shares = [total // parts + (i < total % parts) for i in range(parts)]
        steps.append(Step(requests=tuple((first + i, share) for i, share in enumerate(shares))))
    return Case(
        name="all-prefixed-edges",
        description="bucket - 1, bucket and bucket + 1 tokens of every size, in requests that all have a prefix",
        steps=(*sizes.setup(setup), *steps),
    )


def cached_prefixes(sizes: Sizes) -> Case:
    """Mix prefixes of very different lengths."""
    mixed = ((0, 50), (1, 40), (2, 60), (3, 70))
    return Case(
        name="cached-prefixes",
        description="cached prefixes of 0, 127, 128 and 1000 tokens in one batch",
        steps=(
            Step(requests=((1, sizes.prefix(127)), (2, sizes.prefix(128))), checked=False),
            Step(requests=((3, sizes.prefix(1000)),), checked=False),
            Step(requests=tuple((i, sizes.scaled(count)) for i, count in mixed)),
        ),
    )


def many(sizes: Sizes) -> Case:
    """Give the 5th, 9th, 17th and 33rd request a prefix, and one in four none."""
    prefixes = [(i, sizes.prefix((37, 0, 20, 5)[i % 4])) for i in range(_MANY) if i % 4 != 1]
    return Case(
        name="many-prefixes",
        description=f"{_MANY} requests with and without prefixes: the 5th, 9th, 17th and last have one",
        steps=(
            *sizes.setup(prefixes),
            Step(requests=tuple((i, sizes.scaled(3 + i % 5)) for i in range(_MANY))),
        ),
    )


def decode_rows(sizes: Sizes) -> Case:
    """Put requests of one new token, as in decoding, first, between and last."""
    long, short = max(2, sizes.scaled(60)), max(2, sizes.scaled(9))
    return Case(
        name="decode-rows-in-prefill",
        description="one new token behind a prefix beside longer requests: as the first, between them, and as the last",
        steps=(
            *sizes.setup((i, sizes.prefix(n)) for i, n in ((0, 100), (2, 37), (3, 64))),
            Step(requests=((0, 1), (1, long), (2, 1), (3, short))),
            Step(requests=((4, long), (3, short), (2, 1), (0, 1))),
        ),
    )


def page_edges(sizes: Sizes) -> Case:
    """Begin behind, end at and cross the edges of pages, whatever their size."""
    page, new = sizes.page_size, max(2, sizes.scaled(15))
    begun = (max(1, page - 1), page, page + 1, 2 * page)
    behind = (2, 3, 4, 5)
    # What is missing for ``new`` more tokens to end one short of a page's end, at it, one beyond, and at it again.
    gaps = [(offset - begun[i] - behind[i] - new) % page for i, offset in enumerate((-1, 0, 1, 0))]
    return Case(
        name="page-edges",
        description="prefixes and totals one short of a page's end, at it and one beyond; new tokens over three pages",
        steps=(
            *sizes.setup(enumerate(begun)),
            Step(requests=tuple(enumerate(behind))),
            *sizes.setup(enumerate(gaps)),
            Step(requests=tuple((i, new) for i in range(4))),
            # Over three pages. No fewer than in the batch above, however small pages are: which checks there are must
            # not depend on their size.
            Step(requests=((0, max(page + 2, 8)),)),
        ),
    )


def to_the_limit(sizes: Sizes) -> Case:
    """Let one request grow to the last position that there is."""
    limit = min(sizes.max_context, _FARTHEST)
    last = min(sizes.prefix(60), max(1, limit // 2))
    return Case(
        name="to-the-limit",
        description=f"a request that grows in chunks to the last position of the model, or to {_FARTHEST} tokens",
        # The sequence that is longest in another case too: its right results are computed once.
        steps=(*sizes.setup([(3, limit - last)]), Step(requests=((3, last),))),
    )


def chunks(sizes: Sizes, name: str, counts: tuple[int, ...]) -> Case:
    """Prefill one prompt in several chunks, all of them checked."""
    return Case(
        name=name,
        description=f"a prompt in {name.replace('-', ' ')}, against one pass over all of it",
        steps=tuple(sizes.batch(count) for count in counts),
    )
