"""What a ladder of buckets costs, from what single buckets were measured to cost.

Latency
    A batch costs the measured replay of the bucket that serves it, whatever its composition. Attention runs over real
    rows only, so a batch that does not fill its bucket is charged a little too much. Without a bucket it costs an eager
    prefill of its tokens: piecewise linear between measured sizes, that of the smallest below it, and in proportion
    to its tokens above the largest, where nothing was measured; no choice depends on that last part, as no ladder
    reaches there. Measured costs are taken as they are: a running maximum would charge one slow outlier to all larger
    buckets, and a larger shape may truly be faster, as kernels change with the size.

Capture time
    Of a ladder, the sum over its buckets. The warm-up before the first capture is not in it.

Graph memory
    All buckets share one pool and are captured from the largest to the smallest. So a ladder takes what its largest
    bucket needs alone, and each further bucket adds the growth that was measured. What the largest of all measured
    buckets needs was measured; a smaller one at the top is estimated to need a part of it, in proportion to its
    tokens, and no less than its own measured growth.

Suffix ``_n``: one entry a token count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bcg_harness.bench.costs import BucketCost
from bcg_harness.errors import HarnessError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Quantile = Literal["q1", "median", "q3", "p90"]

NANOSECONDS = 1e9
"""In a second. Capture times are added up as integers, so that the order of buckets makes no difference."""


@dataclass(frozen=True, kw_only=True)
class LadderCosts:
    """Hold the measured costs of buckets with one backend, and estimate those of other sizes.

    Attributes:
        measured: in ascending order, at least one.
    """

    measured: tuple[BucketCost, ...]

    @classmethod
    def of(cls, costs: Iterable[BucketCost]) -> "LadderCosts":
        """Sort measured costs; raises HarnessError for a bucket that is there twice, and for impossible numbers."""
        ordered = sorted(costs, key=lambda cost: cost.bucket)
        for cost in ordered:
            _check(cost)
        for one, other in pairwise(ordered):
            if one.bucket == other.bucket:
                raise HarnessError(f"the costs of bucket {one.bucket} are there twice")
        assert ordered
        return cls(measured=tuple(ordered))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the measured buckets in ascending order."""
        return tuple(cost.bucket for cost in self.measured)

    def replay(self, tokens: Sequence[int] | Integers, quantile: Quantile = "median") -> Floats:
        """Return the seconds that a replay of buckets of so many tokens takes."""
        times = [getattr(cost.replay, quantile) for cost in self.measured]
        return _interpolated(tokens, self.sizes, times)

    def eager(self, tokens: Sequence[int] | Integers, quantile: Quantile = "median") -> Floats:
        """Return the seconds that eager prefills of so many tokens take."""
        times = [getattr(cost.eager, quantile) for cost in self.measured]
        beyond_n = np.maximum(np.asarray(tokens) / self.sizes[-1], 1.0)
        return _interpolated(tokens, self.sizes, times) * beyond_n

    def capture(self, tokens: Sequence[int]) -> Integers:
        """Return the nanoseconds that the capture of buckets of so many tokens takes."""
        seconds = [cost.capture_seconds for cost in self.measured]
        return np.rint(_interpolated(tokens, self.sizes, seconds) * NANOSECONDS).astype(np.int64)

    def growth(self, tokens: Sequence[int]) -> Integers:
        """Return the bytes that buckets of so many tokens add to the pool of a larger one.

        The largest measured bucket was captured into an empty pool, so it says nothing of growth, unless it is the only
        one.
        """
        further = self.measured[:-1] or self.measured
        sizes, memory = zip(*((cost.bucket, cost.memory_bytes) for cost in further), strict=True)
        return np.ceil(_interpolated(tokens, sizes, memory)).astype(np.int64)

    def pool(self, tokens: Sequence[int]) -> Integers:
        """Return the bytes that buckets of so many tokens need as the largest of their ladder."""
        largest = self.measured[-1]
        tokens_n = np.asarray(tokens, np.int64)
        part_n = -(-tokens_n * largest.memory_bytes // largest.bucket)  # rounded up
        least_n = np.where(tokens_n == largest.bucket, 0, self.growth(tokens))
        return np.maximum(part_n, least_n)


def select_costs(costs: Sequence[BucketCost], backend: str | None) -> LadderCosts:
    """Return the costs that were measured with ``backend``, or with the only backend there is.

    Raises HarnessError, with the backends there are, when that is not one.
    """
    if not costs:
        raise HarnessError(
            "there are no bucket costs in it: measure them with bcg bench --bucket-costs --json FILE"
        )
    backends = list(dict.fromkeys(cost.backend for cost in costs))
    if backend is None and len(backends) > 1:
        raise HarnessError(f"there are costs of {', '.join(backends)}: choose one with --backend")
    wanted = backend or backends[0]
    if wanted not in backends:
        raise HarnessError(
            f"no costs of backend {wanted!r}; there are those of {', '.join(backends)}"
        )
    return LadderCosts.of(cost for cost in costs if cost.backend == wanted)


def _interpolated(
    tokens: Sequence[int] | Integers, sizes: Sequence[int], values: Sequence[float]
) -> Floats:
    """Return values at ``tokens``: piecewise linear between ``sizes``, that of the nearest outside."""
    return np.asarray(np.interp(tokens, sizes, values), np.float64)


def _check(cost: BucketCost) -> None:
    if not (
        isfinite(cost.capture_seconds) and cost.capture_seconds >= 0 and cost.memory_bytes >= 0
    ):
        raise HarnessError(
            f"bucket {cost.bucket} has impossible costs: {cost.capture_seconds} s to capture, {cost.memory_bytes} bytes"
        )
