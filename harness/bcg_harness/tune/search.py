"""The ladder with the least expected latency within budgets, found exactly."""

from collections.abc import Sequence

import numpy as np

from bcg_harness.tune.bounds import find_bounds
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import LadderCosts
from bcg_harness.tune.distribution import TokenDistribution
from bcg_harness.tune.labels import Labels
from bcg_harness.tune.moves import Moves

_ROUNDING = 1e-9
"""By how much a bound must miss, relatively, before it counts; sums in another order differ by far less."""


def best_ladder(
    distribution: TokenDistribution,
    costs: LadderCosts,
    budgets: LadderBudgets,
    candidates: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the ladder of ``candidates`` with the least expected latency within ``budgets``; empty for none at all.

    A dynamic programme over candidates from the largest to the smallest, in the order of capture. A label is a choice
    of buckets so far; it leads to every smaller candidate, and to the end. Labels are dropped when they break a budget,
    when another at the same bucket makes them needless, or when a bound says that nothing faster than a ladder that is
    known can come of them. None of this loses the best ladder, so the result is that of a search through all subsets.
    Among equally fast ladders, that with the fewest buckets wins, then the least capture time, then memory.

    Args:
        distribution: batches to serve.
        costs: of buckets.
        budgets: limits of the ladder.
        candidates: ascending; the measured buckets when left out.
    """
    sizes = costs.sizes if candidates is None else tuple(candidates)
    moves = Moves.between(sizes, distribution, costs)
    limits_k = budgets.limits_k
    bounds, known = find_bounds(moves, limits_k)
    labels = Labels.first(moves.beginning)
    for node in range(len(sizes), -1, -1):
        reached = moves.to(node, labels)
        reached = reached.take(np.all(reached.usage_nk <= limits_k, axis=1))
        known = min(
            known, float(np.min(reached.latency_n + moves.step_nn[node, 0], initial=np.inf))
        )
        for bound in bounds:
            reached = reached.take(bound.of(reached) <= known * (1 + _ROUNDING))
        labels = labels.joined(reached.undominated(limits_k))
    (best, *_) = np.flatnonzero(labels.node_n == 0)  # there is one: no bucket is always possible
    return tuple(sizes[node - 1] for node in labels.nodes(int(best))[1:-1])
