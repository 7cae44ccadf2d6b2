"""Bounds never promise too much, and tight ones come of good prices."""

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from bcg_harness.bench.costs import BucketCost
from bcg_harness.tune.bounds import find_bounds
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import LadderCosts
from bcg_harness.tune.distribution import TokenDistribution
from bcg_harness.tune.estimate import estimate
from bcg_harness.tune.moves import Moves
from bcg_harness.tune.search import best_ladder

MakeCost = Callable[..., BucketCost]
BUCKETS = 60


@pytest.fixture(scope="module", params=range(5))
def costs(request: pytest.FixtureRequest, cost: MakeCost) -> LadderCosts:
    """Return random costs: every bucket saves time, and takes another amount of time and memory."""
    random = Random(request.param)
    return LadderCosts.of(
        cost(
            200 * n,
            replay=2 + n * random.uniform(0.97, 1.03),
            eager=18 + n,
            capture=random.uniform(0.1, 0.2),
            memory=random.randrange(2**25) if n < BUCKETS else 2**29,
        )
        for n in range(1, BUCKETS + 1)
    )


@pytest.fixture(scope="module")
def distribution() -> TokenDistribution:
    return TokenDistribution.of((tokens, 1.0) for tokens in range(1, 200 * BUCKETS))


TIGHT = LadderBudgets(max_buckets=20, capture_seconds=2.5, memory_bytes=600 * 2**20)


def test_no_ladder_within_budgets_beats_a_bound_and_one_comes_close(
    costs: LadderCosts, distribution: TokenDistribution
) -> None:
    moves = Moves.between(costs.sizes, distribution, costs)
    (free, priced), known = find_bounds(moves, TIGHT.limits_k)
    ladder = best_ladder(distribution, costs, TIGHT)
    latency = estimate(ladder, distribution, costs).latency.median * distribution.weight
    assert free.least < priced.least <= latency <= known * (1 + 1e-9)
    assert known / priced.least < 1.05


def test_without_budgets_the_first_bound_is_met(
    costs: LadderCosts, distribution: TokenDistribution
) -> None:
    moves = Moves.between(costs.sizes, distribution, costs)
    (bound,), known = find_bounds(moves, LadderBudgets().limits_k)
    assert bound.least == pytest.approx(known)
    assert np.all(bound.prices_k == 0)
