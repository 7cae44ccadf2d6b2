"""What repeated measurements say: a median with its spread, and whether two of them differ."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Summarise samples of one quantity, in its unit (seconds, for all times).

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

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any] | None) -> "Spread | None":
        """Read what ``to_json`` returned, or None."""
        return None if raw is None else cls(**raw)


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

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"ratio": self.ratio, "verdict": self.verdict.value}

    @classmethod
    def from_json(cls, raw: dict[str, Any] | None) -> "Speedup | None":
        """Read what ``to_json`` returned, or None."""
        return None if raw is None else cls(ratio=raw["ratio"], verdict=Verdict(raw["verdict"]))
