"""What is expected of a ladder adds up."""

from collections.abc import Callable

import pytest

from bcg_harness.bench.costs import BucketCost
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import LadderCosts
from bcg_harness.tune.distribution import TokenDistribution
from bcg_harness.tune.estimate import LadderEstimate, estimate

MakeCost = Callable[..., BucketCost]


@pytest.fixture
def costs(cost: MakeCost) -> LadderCosts:
    return LadderCosts.of(
        [
            cost(10, replay=1.0, eager=4.0, capture=0.5, memory=7),
            cost(20, replay=2.0, eager=6.0, capture=1.0, memory=0),
            cost(40, replay=3.0, eager=10.0, capture=1.5, memory=100),
        ]
    )


@pytest.fixture
def of(costs: LadderCosts) -> Callable[..., LadderEstimate]:
    """Return a function that estimates a ladder for 5 tokens, 15 tokens three times as often, and 30 tokens."""
    distribution = TokenDistribution.of([(5, 1.0), (15, 3.0), (30, 1.0)])
    return lambda *ladder: estimate(ladder, distribution, costs)


@pytest.mark.parametrize(
    ("ladder", "seconds"),
    [
        pytest.param((), (4.0 + 3 * 5.0 + 8.0) / 5, id="eager"),
        pytest.param((20,), (2.0 + 3 * 2.0 + 8.0) / 5, id="one-bucket"),
        pytest.param((10, 20, 40), (1.0 + 3 * 2.0 + 3.0) / 5, id="all"),
        pytest.param((30,), 2.5, id="interpolated"),
    ],
)
def test_latency_is_the_average_over_batches(
    of: Callable[..., LadderEstimate], ladder: tuple[int, ...], seconds: float
) -> None:
    assert of(*ladder).latency.median == pytest.approx(seconds)


def test_the_spread_is_that_of_the_measurements(of: Callable[..., LadderEstimate]) -> None:
    latency = of(20).latency
    scaled = [latency.median * factor for factor in (0.9, 1.1, 1.5)]
    assert [latency.q1, latency.q3, latency.p90] == pytest.approx(scaled)
    assert latency.samples == 9


@pytest.mark.parametrize(
    ("ladder", "rows"),
    [
        pytest.param((), 80, id="eager"),
        pytest.param((20,), 20 * 4 + 30, id="one-bucket"),
        pytest.param((10, 20, 40), 10 + 3 * 20 + 40, id="all"),
    ],
)
def test_padding_is_a_fraction_of_all_rows(
    of: Callable[..., LadderEstimate], ladder: tuple[int, ...], rows: int
) -> None:
    assert of(*ladder).padding == pytest.approx(1 - 80 / rows)


@pytest.mark.parametrize(
    ("ladder", "share"),
    [
        pytest.param((), 1.0, id="eager"),
        pytest.param((20,), 0.2, id="one-bucket"),
        pytest.param((30,), 0.0, id="exactly-as-large"),
    ],
)
def test_the_share_of_eager_batches_is_counted(
    of: Callable[..., LadderEstimate], ladder: tuple[int, ...], share: float
) -> None:
    assert of(*ladder).eager_share == pytest.approx(share)


def test_capture_time_and_memory_add_up(of: Callable[..., LadderEstimate]) -> None:
    assert (of(10, 20).capture_seconds, of(10, 20).memory_bytes) == (1.5, 50 + 7)


def test_no_ladder_takes_nothing(of: Callable[..., LadderEstimate]) -> None:
    assert (of().capture_seconds, of().memory_bytes) == (0.0, 0)


def test_buckets_that_were_not_measured_are_named(of: Callable[..., LadderEstimate]) -> None:
    assert of(10, 12, 40).interpolated == (12,)


@pytest.mark.parametrize(
    ("budgets", "over"),
    [
        pytest.param(LadderBudgets(), (), id="none"),
        pytest.param(
            LadderBudgets(max_buckets=2, capture_seconds=1.5, memory_bytes=57), (), id="met"
        ),
        pytest.param(LadderBudgets(max_buckets=1), ("max_buckets",), id="buckets"),
        pytest.param(LadderBudgets(capture_seconds=1.4), ("capture_seconds",), id="capture"),
        pytest.param(LadderBudgets(memory_bytes=56), ("memory_bytes",), id="memory"),
    ],
)
def test_broken_budgets_are_named(
    of: Callable[..., LadderEstimate], budgets: LadderBudgets, over: tuple[str, ...]
) -> None:
    assert of(10, 20).over(budgets) == over
