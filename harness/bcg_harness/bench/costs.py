"""What a bucket and a break cost, apart from any workload. Times are seconds, sizes bytes."""

from dataclasses import dataclass

from bcg_harness.bench.spread import Spread


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Hold what one bucket costs when a single request fills it; what ``bcg tune`` works with.

    Attributes:
        bucket: T, padded tokens.
        backend: that served it.
        replay: latency of a breakable prefill of T tokens.
        eager: latency of an eager prefill of T tokens.
        capture_seconds: time of its capture.
        memory_bytes: graph memory that it added in a capture from the largest bucket to the smallest.
    """

    bucket: int
    backend: str
    replay: Spread
    eager: Spread
    capture_seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class BreakOverhead:
    """Hold what a break costs when it does nothing.

    Attributes:
        bucket: T of the replayed graph.
        breaks: breaks in it.
        host_per_break: host time of a replay without attention, over the number of breaks.
        wall_per_break: by how much such a replay takes longer than one graph without breaks, per break; None where
            the two are too close to tell.
    """

    bucket: int
    breaks: int
    host_per_break: float
    wall_per_break: float | None
