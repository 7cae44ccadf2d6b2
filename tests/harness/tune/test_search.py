"""The proposed ladder is that of a search through all subsets."""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bcg_harness import HarnessError
from bcg_harness.bench.costs import BucketCost
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import LadderCosts
from bcg_harness.tune.distribution import TokenDistribution
from bcg_harness.tune.search import best_ladder

MakeCost = Callable[..., BucketCost]
THOROUGH = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])


class Price(NamedTuple):
    """What a ladder costs, in the order in which ladders are compared."""

    latency: float
    buckets: int
    capture: float
    memory: int


def price(ladder: tuple[int, ...], batches: list[tuple[int, float]], costs: LadderCosts) -> Price:
    """Add up, batch by batch and bucket by bucket, what ``ladder`` costs."""
    of = {cost.bucket: cost for cost in costs.measured}
    latency = 0.0
    for tokens, weight in batches:
        bucket = next((size for size in ladder if size >= tokens), None)
        seconds = costs.eager([tokens])[0] if bucket is None else of[bucket].replay.median
        latency += weight * float(seconds)
    memory = sum(of[size].memory_bytes for size in ladder[:-1])
    memory += sum(int(size) for size in costs.pool(ladder[-1:]))
    capture = sum(of[size].capture_seconds for size in ladder)
    return Price(latency, len(ladder), capture, memory)


def affordable(costs: LadderCosts, budgets: LadderBudgets) -> Iterator[tuple[int, ...]]:
    """Yield every subset of the buckets within ``budgets``."""
    for count in range(len(costs.sizes) + 1):
        for ladder in combinations(costs.sizes, count):
            _, buckets, capture, memory = price(ladder, [], costs)
            spent = (buckets, capture, memory)
            limits = (budgets.max_buckets, budgets.capture_seconds, budgets.memory_bytes)
            if all(b is None or s <= b for s, b in zip(spent, limits, strict=True)):
                yield ladder


def budgets_up_to(capture: int, memory: int) -> st.SearchStrategy[LadderBudgets]:
    return st.builds(
        LadderBudgets,
        max_buckets=st.none() | st.integers(0, 8),
        capture_seconds=st.none() | st.integers(0, capture).map(float),
        memory_bytes=st.none() | st.integers(0, memory),
    )


def bucket_numbers(most: int) -> st.SearchStrategy[dict[str, int]]:
    """Draw the costs of a bucket: small whole numbers, so that ties are frequent and sums are exact."""
    return st.fixed_dictionaries(
        {
            "replay": st.integers(1, most),
            "eager": st.integers(1, most),
            "capture": st.integers(0, 3),
            "memory": st.integers(0, 3),
        }
    )


def measured(cost: MakeCost, numbers: dict[int, dict[str, int]]) -> LadderCosts:
    return LadderCosts.of(cost(size, **of) for size, of in numbers.items())


@THOROUGH
@given(
    numbers=st.dictionaries(st.integers(1, 30), bucket_numbers(40), min_size=1, max_size=7),
    batches=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 4).map(float)), min_size=1, max_size=15
    ),
    budgets=budgets_up_to(12, 12),
)
def test_no_affordable_ladder_is_faster(
    cost: MakeCost,
    numbers: dict[int, dict[str, int]],
    batches: list[tuple[int, float]],
    budgets: LadderBudgets,
) -> None:
    costs = measured(cost, numbers)
    ladder = best_ladder(TokenDistribution.of(batches), costs, budgets)
    possible = list(affordable(costs, budgets))
    assert ladder in possible
    least = min(price(each, batches, costs).latency for each in possible)
    assert price(ladder, batches, costs).latency == pytest.approx(least, rel=1e-12)


@THOROUGH
@given(
    numbers=st.lists(bucket_numbers(3), min_size=1, max_size=7),
    weights=st.lists(st.integers(0, 2), min_size=7, max_size=7),
    budgets=budgets_up_to(8, 8),
)
def test_ties_go_to_fewer_buckets_then_less_capture_then_less_memory(
    cost: MakeCost,
    numbers: list[dict[str, int]],
    weights: list[int],
    budgets: LadderBudgets,
) -> None:
    # Batches fill buckets exactly, so nothing is interpolated, and all latencies are whole numbers.
    costs = measured(cost, {8 * n: of for n, of in enumerate(numbers, start=1)})
    batches = [
        (size, float(weight))
        for size, weight in zip(costs.sizes, weights, strict=False)
        if weight or size == 8
    ]
    ladder = best_ladder(TokenDistribution.of(batches), costs, budgets)
    best = min(price(each, batches, costs) for each in affordable(costs, budgets))
    assert price(ladder, batches, costs) == best


@THOROUGH
@given(
    numbers=st.lists(bucket_numbers(10**6), min_size=1, max_size=9),
    seconds=st.lists(st.floats(0.001, 1.0), min_size=9, max_size=9),
    share=st.floats(0.0, 1.0),
    tokens=st.lists(st.integers(1, 100), min_size=1, max_size=30),
)
def test_fractions_of_seconds_make_no_difference(
    cost: MakeCost,
    numbers: list[dict[str, int]],
    seconds: list[float],
    share: float,
    tokens: list[int],
) -> None:
    rounded = [round(each, 9) for each in seconds]
    costs = measured(
        cost,
        {
            10 * n: {**of, "capture": capture}  # type: ignore[dict-item]
            for n, (of, capture) in enumerate(zip(numbers, rounded, strict=False), start=1)
        },
    )
    # A budget that some ladder meets to the nanosecond, in whatever order its buckets are added up.
    some = [each for number, each in enumerate(rounded[: len(numbers)]) if number / 9 <= share]
    budget = sum(some)
    batches = [(each, 1.0) for each in tokens]
    ladder = best_ladder(
        TokenDistribution.of(batches), costs, LadderBudgets(capture_seconds=budget)
    )
    possible = list(affordable(costs, LadderBudgets(capture_seconds=budget + 1e-10)))
    assert ladder in possible
    least = min(price(each, batches, costs).latency for each in possible)
    assert price(ladder, batches, costs).latency == pytest.approx(least, rel=1e-12)


# By example


@pytest.fixture
def costs(cost: MakeCost) -> LadderCosts:
    """Return costs of three buckets whose replay takes a second a token, eager prefill a hundred more."""
    return LadderCosts.of(
        cost(size, replay=size, eager=size + 100, capture=1.0, memory=memory)
        for size, memory in ((10, 1), (20, 2), (40, 40))
    )


def ladder_for(costs: LadderCosts, *tokens: int, **budgets: Any) -> tuple[int, ...]:
    distribution = TokenDistribution.of((each, 1.0) for each in tokens)
    return best_ladder(distribution, costs, LadderBudgets(**budgets))


def test_every_bucket_that_saves_time_is_proposed(costs: LadderCosts) -> None:
    assert ladder_for(costs, 5, 15, 35) == (10, 20, 40)


def test_a_bucket_that_serves_nothing_is_not_proposed(costs: LadderCosts) -> None:
    assert ladder_for(costs, 5, 35) == (10, 40)


def test_the_largest_batch_may_run_eagerly(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(10, replay=1.0, eager=9.0), cost(40, replay=30.0, eager=20.0)])
    assert ladder_for(costs, 5, 35) == (10,)


def test_eager_alone_is_proposed_where_it_is_fastest(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(10, replay=3.0, eager=2.0), cost(40, replay=30.0, eager=20.0)])
    assert ladder_for(costs, 5, 35) == ()


def test_a_bucket_that_replays_slower_than_a_larger_one_is_not_proposed(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(10, replay=3.0), cost(20, replay=2.0)])
    assert ladder_for(costs, 5, 15) == (20,)


def test_batches_beyond_all_buckets_do_not_matter(costs: LadderCosts) -> None:
    assert ladder_for(costs, 5, 1000) == (10,)


@pytest.mark.parametrize(
    ("budgets", "ladder"),
    [
        pytest.param({"max_buckets": 0}, (), id="no-bucket"),
        pytest.param({"max_buckets": 1}, (40,), id="one-bucket"),
        pytest.param({"max_buckets": 2}, (20, 40), id="two-buckets"),
        pytest.param({"capture_seconds": 0.0}, (), id="no-time"),
        pytest.param({"capture_seconds": 0.999}, (), id="almost-no-time"),
        pytest.param({"capture_seconds": 2.0}, (20, 40), id="some-time"),
        pytest.param({"memory_bytes": 0}, (), id="no-memory"),
        pytest.param({"memory_bytes": 39}, (10, 20), id="little-memory"),
        pytest.param({"memory_bytes": 41}, (10, 40), id="more-memory"),
        pytest.param({"memory_bytes": 43}, (10, 20, 40), id="enough-memory"),
        pytest.param({"memory_bytes": 39, "max_buckets": 1}, (20,), id="two-budgets"),
        pytest.param({"capture_seconds": float("inf")}, (10, 20, 40), id="infinite"),
    ],
)
def test_budgets_are_kept(
    costs: LadderCosts, budgets: dict[str, Any], ladder: tuple[int, ...]
) -> None:
    assert ladder_for(costs, 5, 15, 15, 35, 35, 35, **budgets) == ladder


@pytest.mark.parametrize("limit", [-1.0, float("nan")], ids=str)
def test_an_impossible_budget_is_refused(limit: float) -> None:
    with pytest.raises(HarnessError, match=f"at least 0, but capture_seconds is {limit}"):
        LadderBudgets(capture_seconds=limit)


def test_other_candidates_may_be_given(costs: LadderCosts) -> None:
    distribution = TokenDistribution.of([(25, 1.0)])
    assert best_ladder(distribution, costs, LadderBudgets(), [10, 30, 40]) == (30,)


def test_of_equally_fast_ladders_the_one_that_is_quicker_to_capture_wins(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(10, capture=2.0, memory=1), cost(20, capture=1.0, memory=9)])
    assert ladder_for(costs, 5) == (20,)


def test_of_equally_fast_and_quick_ladders_the_smaller_one_wins(cost: MakeCost) -> None:
    costs = LadderCosts.of([cost(10, memory=1), cost(20, memory=9)])
    assert ladder_for(costs, 5) == (10,)
