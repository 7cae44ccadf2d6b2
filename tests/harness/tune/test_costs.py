"""Costs of ladders follow from measured ones as the model of ``bcg_harness.tune.costs`` says."""

from collections.abc import Callable
from dataclasses import replace
from math import nan

import pytest

from bcg_harness import HarnessError
from bcg_harness.bench.costs import BucketCost
from bcg_harness.tune.costs import LadderCosts, select_costs

MakeCost = Callable[..., BucketCost]


@pytest.fixture
def costs(cost: MakeCost) -> LadderCosts:
    """Return costs that are noisy: the middle bucket replays slowest and adds most."""
    return LadderCosts.of(
        [
            cost(100, replay=4.0, eager=20.0, capture=3.0, memory=1000),
            cost(10, replay=1.0, eager=8.0, capture=1.0, memory=0),
            cost(50, replay=5.0, eager=12.0, capture=2.0, memory=80),
        ]
    )


def test_buckets_are_sorted(costs: LadderCosts) -> None:
    assert costs.sizes == (10, 50, 100)


def test_a_measured_bucket_costs_what_was_measured_noise_included(costs: LadderCosts) -> None:
    assert costs.replay([10, 50, 100]).tolist() == [1.0, 5.0, 4.0]


def test_other_quantiles_are_those_measured(costs: LadderCosts) -> None:
    assert costs.replay([50], "p90").tolist() == [7.5]
    assert costs.eager([50], "q1").tolist() == pytest.approx([10.8])


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        pytest.param(1, 8.0, id="below"),
        pytest.param(10, 8.0, id="smallest"),
        pytest.param(30, 10.0, id="between"),
        pytest.param(75, 16.0, id="between-others"),
        pytest.param(100, 20.0, id="largest"),
        pytest.param(150, 30.0, id="above"),
    ],
)
def test_eager_prefill_is_interpolated(costs: LadderCosts, tokens: int, seconds: float) -> None:
    assert costs.eager([tokens]).tolist() == pytest.approx([seconds])


def test_capture_is_in_nanoseconds(costs: LadderCosts) -> None:
    assert costs.capture([10, 30, 100]).tolist() == [10**9, 15 * 10**8, 3 * 10**9]


@pytest.mark.parametrize(
    ("tokens", "grown"),
    [
        pytest.param(5, 0, id="below"),
        pytest.param(10, 0, id="smallest"),
        pytest.param(30, 40, id="between"),
        pytest.param(31, 42, id="between-exact"),
        pytest.param(50, 80, id="second-largest"),
        pytest.param(99, 80, id="the-largest-says-nothing-of-growth"),
    ],
)
def test_a_further_bucket_adds_its_measured_growth(
    costs: LadderCosts, tokens: int, grown: int
) -> None:
    assert costs.growth([tokens]).tolist() == [grown]


def test_growth_is_rounded_up(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(1, memory=0), cost(4, memory=1), cost(9, memory=50)])
    assert costs.growth([2]).tolist() == [1]


@pytest.mark.parametrize(
    ("tokens", "needed"),
    [
        pytest.param(100, 1000, id="all-of-what-was-measured"),
        pytest.param(50, 500, id="half"),
        pytest.param(1, 10, id="little"),
    ],
)
def test_the_largest_bucket_needs_a_part_of_what_was_measured(
    costs: LadderCosts, tokens: int, needed: int
) -> None:
    assert costs.pool([tokens]).tolist() == [needed]


def test_the_largest_bucket_needs_no_less_than_its_growth(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(10, memory=60), cost(20, memory=100)])
    assert costs.pool([10]).tolist() == [60]


def test_the_largest_measured_bucket_needs_what_was_measured(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(10, memory=600), cost(20, memory=100)])
    assert costs.pool([20]).tolist() == [100]


def test_a_part_of_the_pool_is_rounded_up_exactly(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(3, memory=0), cost(7, memory=10**12 + 1)])
    assert costs.pool([3]).tolist() == [-(-3 * (10**12 + 1) // 7)]


def test_a_single_measured_bucket_says_all(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(16, replay=2.0, memory=100)])
    assert costs.replay([8]).tolist() == [2.0]
    assert costs.growth([8]).tolist() == [100]
    assert costs.pool([16]).tolist() == [100]


# Which costs


def test_the_only_backend_is_taken(cost: MakeCost) -> None:
    assert select_costs([cost(16), cost(64)], None).sizes == (16, 64)


def test_a_backend_is_chosen_by_name(cost: MakeCost) -> None:
    costs = select_costs([cost(16, backend="a"), cost(64, backend="b")], "b")
    assert costs.sizes == (64,)


def test_several_backends_want_a_choice(cost: MakeCost) -> None:
    with pytest.raises(HarnessError, match="costs of a, b: choose one with --backend"):
        select_costs([cost(16, backend="a"), cost(16, backend="b")], None)


def test_an_unknown_backend_is_refused_with_the_known_ones(cost: MakeCost) -> None:
    with pytest.raises(HarnessError, match="no costs of backend 'c'; there are those of a, b"):
        select_costs([cost(16, backend="a"), cost(16, backend="b")], "c")


def test_no_costs_are_refused_with_how_to_measure_them() -> None:
    with pytest.raises(HarnessError, match="bcg bench --bucket-costs"):
        select_costs([], None)


def test_a_bucket_that_is_there_twice_is_refused(cost: MakeCost) -> None:
    with pytest.raises(HarnessError, match="bucket 16 are there twice"):
        LadderCosts.of([cost(16), cost(64), cost(16)])


@pytest.mark.parametrize(
    "change",
    [{"capture_seconds": -1.0}, {"capture_seconds": nan}, {"memory_bytes": -1}],
    ids=["capture", "capture-nan", "memory"],
)
def test_an_impossible_cost_is_refused(cost: MakeCost, change: dict[str, float]) -> None:
    with pytest.raises(HarnessError, match="bucket 16 has impossible costs"):
        LadderCosts.of([replace(cost(16), **change)])
