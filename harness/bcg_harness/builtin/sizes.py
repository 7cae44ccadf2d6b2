"""What the lengths of the built-in cases go by, and the steps that are made of them."""

from collections.abc import Iterable
from dataclasses import dataclass

from bcg_harness.cases import Step

_NOMINAL = 256
_MOST_SETUP_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Hold what a case is sized by.

    Lengths are written down for a largest bucket of 256 tokens and scaled to others, so that a case finds the same
    thing there.

    Attributes:
        buckets: captured token counts, ascending.
        page_size: tokens a KV page; may be larger than every bucket.
        max_context: tokens of the longest request that there can be.
    """

    buckets: tuple[int, ...]
    page_size: int
    max_context: int

    @property
    def largest(self) -> int:
        """Return the largest bucket."""
        return self.buckets[-1]

    @property
    def samples(self) -> list[int]:
        """Return all buckets of a short ladder; of a long one its ends and its middle."""
        return sorted({self.buckets[0], self.buckets[len(self.buckets) // 2], self.buckets[-1]})

    def scaled(self, tokens: int) -> int:
        """Return ``tokens`` of a 256-token bucket in proportion to the largest one, at least 1."""
        return max(1, tokens * self.largest // _NOMINAL)

    def prefix(self, tokens: int) -> int:
        """Return ``tokens`` scaled down, never up, so that prefixes stay what they are behind large buckets."""
        return min(tokens, self.scaled(tokens))

    def batch(self, *tokens: int, first: int = 0) -> Step:
        """Return a step of sequences numbered from ``first``, with nominal token counts."""
        return Step(requests=tuple((first + i, self.scaled(n)) for i, n in enumerate(tokens)))

    def largest_bucket(self, *tokens: int, first: int = 0) -> Step:
        """Return ``batch(*tokens)``, its last request made long enough for no smaller bucket to hold the batch."""
        *others, last = self.batch(*tokens, first=first).requests
        floor = self.buckets[-2] if len(self.buckets) > 1 else 0
        missing = floor + 1 - last[1] - sum(count for _, count in others)
        return Step(requests=(*others, (last[0], last[1] + max(0, missing))))

    def exactly(self, tokens: int, first: int) -> Step:
        """Return a step of ``tokens`` tokens: one new sequence, or as few as the context allows."""
        full, rest = divmod(tokens, self.max_context)
        counts = [self.max_context] * full + [rest] * (rest > 0)
        return Step(requests=tuple((first + i, count) for i, count in enumerate(counts)))

    def setup(self, requests: Iterable[tuple[int, int]]) -> list[Step]:
        """Return unchecked steps that prefill ``requests``: (sequence, tokens), which may be none.

        A step fills the largest bucket. Where that would take many steps, fewer and longer ones run eagerly.
        """
        requests = list(requests)
        total = sum(tokens for _, tokens in requests)
        room = max(self.largest, -(-total // _MOST_SETUP_STEPS))
        steps: list[list[tuple[int, int]]] = []
        free = 0
        for sequence, missing in requests:
            while missing:
                if not free:
                    steps.append([])
                    free = room
                tokens = min(missing, free)
                steps[-1].append((sequence, tokens))
                missing, free = missing - tokens, free - tokens
        return [Step(requests=tuple(step), checked=False) for step in steps]
