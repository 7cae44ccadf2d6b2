"""What repeated measurements say: a median with its spread, and whether two of them differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from statistics import median, quantiles

from bcg_harness.errors import HarnessError


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Summarise samples of a time, in seconds; raises HarnessError for what is no positive number.

    Attributes:
        samples: how many there are.
        median: middle value.
        p90: 90th percentile.
        q1: first quartile.
        q3: third quartile.
    """

    samples: int
    median: float
    p90: float
    q1: float
    q3: float

    def __post_init__(self) -> None:
        times = (self.q1, self.median, self.q3, self.p90)
        if not all(isfinite(seconds) and seconds > 0 for seconds in times):
            raise HarnessError(f"quartiles and 90th percentile {times} are no positive times")

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Summarise ``samples``, of which there is at least one; percentiles interpolate between samples."""
        if len(samples) == 1:
            only = samples[0]
            return cls(samples=1, median=only, p90=only, q1=only, q3=only)
        percent = quantiles(samples, n=100, method="inclusive")
        return cls(
            samples=len(samples),
            median=median(samples),
            p90=percent[89],
            q1=percent[24],
            q3=percent[74],
        )

    @property
    def iqr(self) -> float:
        """Return the interquartile range."""
        return self.q3 - self.q1


class Verdict(Enum):
    """Say what two spreads allow to say."""

    FASTER = "faster"
    SLOWER = "slower"
    TOO_CLOSE = "too close to call"


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Compare a time with that of a baseline.

    Attributes:
        ratio: median of the baseline over the median at hand; above 1 is faster.
        verdict: too close to call when the interquartile ranges overlap.
    """

    ratio: float
    verdict: Verdict

    @classmethod
    def over(cls, baseline: Spread, spread: Spread) -> "Speedup":
        """Compare ``spread`` with ``baseline``."""
        if spread.q3 < baseline.q1:
            verdict = Verdict.FASTER
        elif spread.q1 > baseline.q3:
            verdict = Verdict.SLOWER
        else:
            verdict = Verdict.TOO_CLOSE
        return cls(ratio=baseline.median / spread.median, verdict=verdict)
