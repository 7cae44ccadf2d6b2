"""The proposed ladder stands beside others."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bcg_core import TokenBuckets
from bcg_harness import HarnessError
from bcg_harness.bench.costs import BucketCost
from bcg_harness.bench.spread import Verdict
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import LadderCosts
from bcg_harness.tune.distribution import TokenDistribution
from bcg_harness.tune.proposal import Proposal, propose

MakeCost = Callable[..., BucketCost]


@pytest.fixture
def costs(cost: MakeCost) -> LadderCosts:
    """Return costs of which only bucket 16 is worth its capture."""
    return LadderCosts.of(
        [
            cost(8, replay=1.0, eager=9.0),
            cost(16, replay=1.0, eager=10.0),
            cost(64, replay=40.0, eager=10.0),
        ]
    )


def proposed(costs: LadderCosts, *tokens: int, step: int | None = None, **budgets: Any) -> Proposal:
    distribution = TokenDistribution.of((each, 1.0) for each in tokens)
    return propose(distribution, costs, LadderBudgets(**budgets), step=step)


def test_all_four_ladders_are_there(costs: LadderCosts) -> None:
    ladders = {name: row.ladder for name, row in proposed(costs, 5, 15, 60).rows.items()}
    assert ladders == {
        "proposed": (16,),
        "default": tuple(TokenBuckets.ladder(60)),
        "one bucket": (16,),
        "eager": (),
    }


def test_the_default_ladder_ends_at_the_largest_measured_bucket(costs: LadderCosts) -> None:
    assert proposed(costs, 5, 1000).default.ladder == tuple(TokenBuckets.ladder(64))


def test_the_single_bucket_keeps_the_budgets(costs: LadderCosts) -> None:
    assert proposed(costs, 5, capture_seconds=0.0).single.ladder == ()


def test_speedups_are_over_the_default_ladder(costs: LadderCosts) -> None:
    proposal = proposed(costs, 5, 15, 60)
    speedup = proposal.speedup(proposal.proposed)
    assert speedup.verdict is Verdict.FASTER
    assert speedup.ratio == pytest.approx(
        proposal.default.latency.median / proposal.proposed.latency.median
    )


def test_what_lies_within_the_noise_is_too_close_to_call(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(8, replay=1.0), cost(16, replay=1.05)])
    proposal = proposed(costs, 5, 15, max_buckets=1)
    assert proposal.proposed.ladder == (16,)
    assert proposal.speedup(proposal.proposed).verdict is Verdict.TOO_CLOSE


def test_only_measured_buckets_are_candidates(costs: LadderCosts) -> None:
    assert proposed(costs, 5).candidates == (8, 16, 64)


def test_a_step_adds_candidates_between_measured_ones(costs: LadderCosts) -> None:
    assert proposed(costs, 5, step=24).candidates == (8, 16, 24, 48, 64)


def test_a_step_too_small_is_refused(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(8), cost(4096)])
    with pytest.raises(HarnessError, match="a step of 8 makes 512 candidates, at most 128"):
        proposed(costs, 5, step=8)


def test_a_proposal_is_json(costs: LadderCosts) -> None:
    raw = json.loads(json.dumps(proposed(costs, 5, 15, 60, max_buckets=3).to_json()))
    assert raw["batches"] == {"count": 3, "distinct": 3, "mean_tokens": 80 / 3, "most_tokens": 60}
    assert raw["budgets"] == {"max_buckets": 3, "capture_seconds": None, "memory_bytes": None}
    assert raw["ladders"]["proposed"]["ladder"] == [16]
    assert raw["ladders"]["default"]["over_budget"] is True
    assert raw["ladders"]["eager"]["speedup_over_default"]["verdict"] == "faster"
