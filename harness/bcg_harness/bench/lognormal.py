"""Lognormal lengths, as those of prompts in real traffic are: most short, a few very long."""

import math
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """Describe lengths whose logarithm is normally distributed, clipped at both ends.

    Attributes:
        median: tokens.
        sigma: standard deviation of the natural logarithm.
        least: shorter ones become this long.
        most: longer ones become this long.
    """

    median: int
    sigma: float
    least: int
    most: int

    @classmethod
    def exactly(cls, length: int) -> "Lognormal":
        """Return the distribution that knows one length only."""
        return cls(median=length, sigma=0.0, least=length, most=length)

    def around(self, median: int) -> "Lognormal":
        """Return the same distribution stretched to another median, its ends with it."""
        least, most = (max(1, end * median // self.median) for end in (self.least, self.most))
        return replace(self, median=median, least=least, most=most)

    def draw(self, random: Random) -> int:
        """Return one length.

        Only ``random.random()`` is used: of all generators of ``Random``, it alone gives the same numbers in every
        version of Python.
        """
        deviation = _NORMAL.inv_cdf(random.random())
        length = round(self.median * math.exp(self.sigma * deviation))
        return min(max(length, self.least), self.most)

    def __str__(self) -> str:
        return f"{self.least} to {self.most} tokens, median {self.median}"
