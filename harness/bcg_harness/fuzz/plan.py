"""Which compositions a run goes through, block by block: a block shares a ladder, a page size and a capture."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from bcg_core import TokenBuckets
from bcg_harness.cases import Case
from bcg_harness.errors import HarnessError
from bcg_harness.fuzz.draw import PAGE_FACTORS, Bounds, draw_case, draw_ladder

BLOCK = 100
"""Cases that share a capture, as a capture costs as much as many cases."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Hold cases that run one after the other in one runner.

    Attributes:
        buckets: what is captured.
        page_size: tokens a KV page.
        cases: in order.
    """

    buckets: TokenBuckets
    page_size: int
    cases: tuple[Case, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Name every case of a run by seed and number: number i of a seed is the same in runs of any length.

    Attributes:
        seed: of everything that is drawn.
        cases: how many.
        buckets: the ladder of all blocks; None draws one for each.
        page_size: tokens a KV page in all blocks; None draws it for each.
        page_multiple: drawn page sizes are multiples of this.
        bounds: of what is drawn.
    """

    seed: int
    cases: int
    buckets: TokenBuckets | None = None
    page_size: int | None = None
    page_multiple: int = 1
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        if self.cases < 1:
            raise HarnessError(f"{self.cases} cases are nothing to run: ask for at least one")

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in order; the last may be short."""
        for first in range(0, self.cases, BLOCK):
            yield self._block(first, min(first + BLOCK, self.cases))

    def _block(self, first: int, stop: int) -> Block:
        random = self._random("block", first // BLOCK)
        drawn = draw_ladder(random, self.bounds)
        buckets = self.buckets or drawn
        page_size = self.page_size or self.page_multiple * random.choice(PAGE_FACTORS)
        cases = tuple(
            draw_case(
                self._random("case", number), self.name(number), buckets, self.bounds, page_size
            )
            for number in range(first, stop)
        )
        return Block(buckets=buckets, page_size=page_size, cases=cases)

    def name(self, number: int) -> str:
        """Return what case ``number`` is called."""
        return f"fuzz-{self.seed}-{number}"

    def _random(self, what: str, number: int) -> Random:
        # Of text, so that neighbouring seeds and numbers have nothing in common.
        return Random(f"{what} {number} of seed {self.seed}")
