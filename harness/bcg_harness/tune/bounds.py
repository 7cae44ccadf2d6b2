"""Bounds of what can still become of a label, so that the search need not try."""

from dataclasses import dataclass

import numpy as np

from bcg_harness.tune.budgets import UNLIMITED
from bcg_harness.tune.costs import Floats, Integers
from bcg_harness.tune.labels import Labels
from bcg_harness.tune.moves import Moves

_ROUNDS = 150
"""Of the search for prices; more hardly improve them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """Bound the latency of every ladder within budgets that a label can become, from below.

    Whoever may break a budget at a price is at least as fast as whoever may not, and what a ladder within budgets saves
    can only lower the bound. So it holds for any prices that are not negative; good ones make it tight. This is known
    as Lagrangian relaxation.

    Attributes:
        prices_k: latency that each unit of what is limited counts for.
        rest_n: least priced latency from a node to the end, less the price of all that is allowed.
    """

    prices_k: Floats
    rest_n: Floats

    @property
    def least(self) -> float:
        """Return the bound of all ladders."""
        return float(self.rest_n[-1])

    def of(self, labels: Labels) -> Floats:
        """Return the bound of each label."""
        priced: Floats = labels.latency_n + labels.usage_nk @ self.prices_k
        return priced + self.rest_n[labels.node_n]


def find_bounds(moves: Moves, limits_k: Integers) -> tuple[tuple[Bound, ...], float]:
    """Return bounds, one without prices and one with good ones, and the latency of a ladder within ``limits_k``.

    Prices are found by subgradient ascent: what the best ladder at the current prices takes too much of gets dearer,
    what it leaves over gets cheaper. If they are not the best there are, the search takes longer, and that is all.
    """
    limited_k = limits_k < UNLIMITED
    scale_k = np.maximum(limits_k, 1)
    known = float(moves.step_nn[moves.beginning, 0])
    bounds: list[Bound] = []
    pace, prices_k = 1.0, np.zeros(len(limits_k))
    for _ in range(_ROUNDS):
        rest_n, next_n = moves.cheapest(prices_k)
        latency, usage_k = moves.follow(next_n)
        if (usage_k <= limits_k).all():
            known = min(known, latency)
        bound = Bound(prices_k=prices_k, rest_n=rest_n - prices_k @ limits_k)
        if not bounds or bound.least > bounds[-1].least:
            bounds = [*bounds[:1], bound]
            excess_k = np.where(limited_k, (usage_k - limits_k) / scale_k, 0.0)
        else:
            pace /= 2
        missing = known - bounds[-1].least
        if missing <= 0 or not excess_k.any():
            break
        step_k = pace * missing / (excess_k @ excess_k) * excess_k
        prices_k = np.maximum(bounds[-1].prices_k * scale_k + step_k, 0.0) / scale_k
    return tuple(bounds), known
