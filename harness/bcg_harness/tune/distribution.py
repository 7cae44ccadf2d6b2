"""How many tokens batches have, and how often."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bcg_harness.errors import HarnessError
from bcg_harness.selection import MOST_TOKENS, read_text
from bcg_harness.tune.costs import Floats, Integers

MOST_WEIGHT = 1e12
"""The largest weight of a batch that makes sense; keeps sums far from where floats end."""


_NUMBER = re.compile(r"[0-9.eE+-]+")
"""Python also reads 3_00 and digits of other scripts, which are more likely damage than numbers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenDistribution:
    """Hold the distinct token counts of batches with their weights.

    Suffix ``_n``: one entry a distinct count.

    Attributes:
        tokens_n: ascending.
        weights_n: above 0; how often, in any unit.
        batches: how many batches it was made of.
    """

    tokens_n: Integers
    weights_n: Floats
    batches: int

    @classmethod
    def of(cls, batches: Iterable[tuple[int, float]]) -> "TokenDistribution":
        """Collect (tokens, weight) of batches, of which there is at least one."""
        weights: dict[int, float] = {}
        count = 0
        for tokens, weight in batches:
            weights[tokens] = weights.get(tokens, 0.0) + weight
            count += 1
        assert count
        ordered = sorted(weights.items())
        return cls(
            tokens_n=np.array([tokens for tokens, _ in ordered], np.int64),
            weights_n=np.array([weight for _, weight in ordered], np.float64),
            batches=count,
        )

    @property
    def largest(self) -> int:
        """Return the most tokens of a batch."""
        return int(self.tokens_n[-1])

    @property
    def weight(self) -> float:
        """Return the sum of all weights."""
        return float(self.weights_n.sum())

    def share(self, chosen_n: NDArray[np.bool_]) -> float:
        """Return the weight of some batches as a fraction of all."""
        return float(self.weights_n[chosen_n].sum()) / self.weight

    @property
    def mean(self) -> float:
        """Return the expected tokens of a batch."""
        return float(self.weights_n @ self.tokens_n) / self.weight


def read_lengths(path: Path) -> list[tuple[int, float]]:
    """Read a file of batches, one a line: its tokens and, behind a blank or a comma, its weight, 1 if left out.

    Empty lines are skipped. Raises HarnessError, with path and line number, for anything else.
    """
    batches = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        fields = line.replace(",", " ").split()
        if not fields:
            continue
        try:
            batches.append(_batch(fields))
        except ValueError as error:
            raise HarnessError(
                f"{path}, line {number}: found {line.strip()[:80]!r}, expected tokens of a batch (1 to {MOST_TOKENS}) "
                "and, if you like, its weight (above 0), such as: 300 2.5"
            ) from error
    if not batches:
        raise HarnessError(f"{path} holds no lengths: expected one a line, such as: 300 2.5")
    return batches


def _batch(fields: list[str]) -> tuple[int, float]:
    if not all(map(_NUMBER.fullmatch, fields)):
        raise ValueError
    tokens, weight = int(fields[0]), float(fields[1]) if len(fields) > 1 else 1.0
    if len(fields) > 2 or not 1 <= tokens <= MOST_TOKENS or not 0 < weight <= MOST_WEIGHT:
        raise ValueError
    return tokens, weight
