"""The cases that every backend is held to, sized by the buckets.

Written down for a largest bucket of 256 tokens and scaled to others, so that each case finds the same thing there.
"""

from collections.abc import Sequence

from bcg_harness.cases import Case, Step

_NOMINAL = 256


def builtin_cases(buckets: Sequence[int], *, max_context: int = 2048) -> list[Case]:
    """Return the built-in cases for these captured token counts, in the order in which they are run.

    Requests that would be longer than ``max_context`` are split into several.
    """
    cases = _Builder(buckets, max_context)
    return [
        cases.one_request(),
        cases.two_requests(),
        cases.other_boundaries(),
        cases.around("bucket-minus-1", -1),
        cases.around("bucket", 0),
        cases.around("bucket-plus-1", 1),
        cases.around_with_prefix(),
        cases.one_token(),
        cases.one_token_requests(),
        cases.above_largest(),
        cases.cached_prefixes(),
        cases.chunks("two-chunks", (127, 73)),
        cases.chunks("five-chunks", (64, 63, 1, 16, 56)),
        cases.large_then_small(),
        cases.bucket_order(),
        cases.no_requests(),
    ]


class _Builder:
    def __init__(self, buckets: Sequence[int], max_context: int) -> None:
        sizes = sorted(buckets)
        self.largest = sizes[-1]
        self.max_context = max_context
        self.floor = sizes[-2] if len(sizes) > 1 else 0
        # All of a short ladder; of a long one its ends and its middle.
        self.sizes = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})

    def scaled(self, tokens: int) -> int:
        """Return ``tokens`` of a 256-token bucket in proportion to the largest one, at least 1."""
        return max(1, tokens * self.largest // _NOMINAL)

    def prefix(self, tokens: int) -> int:
        """Return ``tokens`` scaled down, never up, so that prefixes stay what they are behind large buckets."""
        return min(tokens, self.scaled(tokens))

    def batch(self, *tokens: int, first: int = 0, checked: bool = True) -> Step:
        """Return a step of sequences numbered from ``first``, with nominal token counts."""
        requests = tuple((first + i, self.scaled(count)) for i, count in enumerate(tokens))
        return Step(requests=requests, checked=checked)

    def largest_bucket(self, *tokens: int, first: int = 0) -> Step:
        """Return ``batch(*tokens)``, its last request made long enough for no smaller bucket to hold the batch."""
        *others, last = self.batch(*tokens, first=first).requests
        missing = self.floor + 1 - last[1] - sum(count for _, count in others)
        return Step(requests=(*others, (last[0], last[1] + max(0, missing))))

    def exactly(self, tokens: int, first: int) -> Step:
        """Return a step of ``tokens`` tokens: one new sequence, or as few as the context allows."""
        full, rest = divmod(tokens, self.max_context)
        counts = [self.max_context] * full + [rest] * (rest > 0)
        return Step(requests=tuple((first + i, count) for i, count in enumerate(counts)))

    def one_request(self) -> Case:
        return Case(
            name="one-request",
            description="one request that fills most of a bucket",
            steps=(self.batch(200),),
        )

    def two_requests(self) -> Case:
        return Case(
            name="two-requests",
            description="as many tokens in two requests: attention must not cross the boundary",
            steps=(self.batch(80, 120),),
        )

    def other_boundaries(self) -> Case:
        return Case(
            name="other-boundaries",
            description="the same bucket again with other boundaries: nothing of the first replay may be frozen",
            steps=(
                self.largest_bucket(200),
                self.largest_bucket(80, 120, first=1),
                self.largest_bucket(240, first=3),
            ),
        )

    def around(self, name: str, offset: int) -> Case:
        counts = [max(1, size + offset) for size in self.sizes]
        what = {-1: "one token fewer than a bucket", 0: "exactly a bucket: no padded row"}
        return Case(
            name=name,
            description=what.get(
                offset, "one token more: the next bucket, or eager above the last"
            ),
            steps=tuple(self.exactly(count, first=16 * i) for i, count in enumerate(counts)),
        )

    def around_with_prefix(self) -> Case:
        prefix, steps = self.prefix(37), []
        setup = Step(requests=tuple((i, prefix) for i in range(3)), checked=False)
        for number, offset in enumerate((-1, 0, 1)):
            total = max(2, self.largest + offset)
            alone = max(1, total // 3)
            steps.append(Step(requests=((number, total - alone), (number + 3, alone))))
        return Case(
            name="prefix-edges",
            description="bucket - 1, bucket and bucket + 1 tokens, split between a request with and one without prefix",
            steps=(setup, *steps),
        )

    def one_token(self) -> Case:
        return Case(
            name="one-token",
            description="a single token: all but one row of the smallest bucket are padding",
            steps=(Step(requests=((0, 1),)),),
        )

    def one_token_requests(self) -> Case:
        count = self.scaled(64)
        return Case(
            name="one-token-each",
            description="many requests of one token each",
            steps=(Step(requests=tuple((i, 1) for i in range(count))),),
        )

    def above_largest(self) -> Case:
        over = self.largest + max(1, self.scaled(44))
        first = max(1, over // 3)
        return Case(
            name="above-largest",
            description="more tokens than the largest bucket: eager, with the reason counted",
            steps=(Step(requests=((0, first), (1, over - first))),),
        )

    def cached_prefixes(self) -> Case:
        mixed = ((0, 50), (1, 40), (2, 60), (3, 70))
        return Case(
            name="cached-prefixes",
            description="cached prefixes of 0, 127, 128 and 1000 tokens in one batch",
            steps=(
                Step(requests=((1, self.prefix(127)), (2, self.prefix(128))), checked=False),
                Step(requests=((3, self.prefix(1000)),), checked=False),
                Step(requests=tuple((i, self.scaled(count)) for i, count in mixed)),
            ),
        )

    def chunks(self, name: str, counts: tuple[int, ...]) -> Case:
        return Case(
            name=name,
            description=f"a prompt in {name.replace('-', ' ')}, against one pass over all of it",
            steps=tuple(self.batch(count) for count in counts),
        )

    def large_then_small(self) -> Case:
        return Case(
            name="large-then-small",
            description="many requests, then few in the same bucket: no row of the first may be left",
            steps=(
                self.largest_bucket(*[8] * 32),
                self.largest_bucket(100, 50, first=32),
                self.largest_bucket(90, first=34),
            ),
        )

    def bucket_order(self) -> Case:
        """Walk over every ordered pair of buckets."""
        order = [0]
        for first in range(len(self.sizes)):
            for second in range(first + 1, len(self.sizes)):
                order += [second, first]
            if first + 1 < len(self.sizes):
                order.append(first + 1)
        if len(self.sizes) == 1:
            order = [0, 0, 0]
        counts = [max(1, self.sizes[i] - max(1, self.sizes[i] // 8)) for i in order]
        return Case(
            name="bucket-order",
            description="buckets replayed in every order (A, B, A)",
            steps=tuple(self.exactly(count, first=16 * i) for i, count in enumerate(counts)),
        )

    def no_requests(self) -> Case:
        return Case(
            name="no-requests",
            description="a batch without requests, and a normal one after it",
            steps=(Step(requests=()), self.batch(100)),
        )
