"""Random compositions: what is drawn, and that it can be had again."""

import json
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg_core import TokenBuckets
from bcg_harness import Case, HarnessError, read_cases
from bcg_harness.fuzz.draw import Bounds, draw_case, draw_ladder
from bcg_harness.fuzz.plan import BLOCK, Plan

BUCKETS = TokenBuckets([8, 24])
BOUNDS = Bounds(most_context=60)
MANY = [
    case
    for block in Plan(seed=0, cases=300, buckets=BUCKETS, bounds=BOUNDS).blocks()
    for case in block.cases
]

bounds = st.builds(
    Bounds,
    most_bucket=st.integers(1, 64),
    most_buckets=st.integers(1, 6),
    most_steps=st.integers(1, 6),
    most_requests=st.integers(1, 9),
    most_crowd=st.integers(1, 40),
    most_context=st.integers(1, 200),
)


@given(seed=st.integers(0, 2**63), bounds=bounds, page_size=st.integers(1, 300))
def test_what_is_drawn_keeps_its_bounds(seed: int, bounds: Bounds, page_size: int) -> None:
    random = Random(seed)
    buckets = draw_ladder(random, bounds)
    case = draw_case(random, "drawn", buckets, bounds, page_size)
    assert len(buckets) <= bounds.most_buckets
    assert buckets[-1] <= bounds.most_bucket
    assert len(case.steps) <= bounds.most_steps
    most_requests = max(bounds.most_requests, bounds.most_crowd)
    assert max(len(step.requests) for step in case.steps) <= most_requests
    assert max(case.lengths.values(), default=0) <= bounds.most_context


@given(seed=st.integers(0, 2**63))
def test_the_last_batch_is_checked(seed: int) -> None:
    assert draw_case(Random(seed), "drawn", BUCKETS, BOUNDS, 16).steps[-1].checked


@pytest.mark.parametrize("edge", [7, 8, 9, 23, 24, 25])
def test_edges_of_buckets_are_drawn(edge: int) -> None:
    assert edge in {step.num_tokens for case in MANY for step in case.steps}


@pytest.mark.parametrize(
    "holds",
    [
        lambda case: any(not step.requests for step in case.steps),
        lambda case: any(not step.checked for step in case.steps),
        lambda case: any(step.num_tokens > 25 for step in case.steps),
        lambda case: any(len(step.requests) == step.num_tokens > 2 for step in case.steps),
        lambda case: any(len(step.requests) == BOUNDS.most_requests for step in case.steps),
        lambda case: case.has_prefix,
        lambda case: len(case.steps) == BOUNDS.most_steps and len(case.lengths) == 1,
    ],
    ids=["nobody", "unchecked", "above", "one-token-each", "many", "prefix", "chunks"],
)
def test_every_kind_of_composition_is_drawn(holds: Callable[[Case], bool]) -> None:
    assert sum(map(holds, MANY)) >= 3


def spans_of(case: Case) -> list[list[tuple[int, int]]]:
    """Return the (prefix, total) of each request of each step."""
    lengths: Counter[int] = Counter()
    found = []
    for step in case.steps:
        before = lengths.copy()
        lengths.update(dict(step.requests))
        found.append([(before[sequence], lengths[sequence]) for sequence, _ in step.requests])
    return found


@pytest.mark.parametrize(
    "holds",
    [
        lambda step: any(start and start % 16 == 0 for start, _ in step),
        lambda step: any(start and stop % 16 == 0 for start, stop in step),
        lambda step: any(start and stop % 16 == 15 for start, stop in step),
        lambda step: any(start and stop % 16 == 1 for start, stop in step),
    ],
    ids=["prefix", "total", "one-short", "one-beyond"],
)
def test_page_edges_are_drawn_more_often_than_by_chance(
    holds: Callable[[list[tuple[int, int]]], bool],
) -> None:
    def count(page_size: int) -> int:
        plan = Plan(seed=0, cases=300, buckets=BUCKETS, page_size=page_size, bounds=BOUNDS)
        cases = [case for block in plan.blocks() for case in block.cases]
        return sum(holds(step) for case in cases for step in spans_of(case))

    assert count(16) > 1.3 * count(300)


def test_one_token_behind_a_prefix_is_drawn_beside_longer_requests() -> None:
    steps = [step for case in MANY for step in spans_of(case)]
    mixed = [
        step
        for step in steps
        if any(start and stop - start == 1 for start, stop in step)
        and any(stop - start > 1 for start, stop in step)
    ]
    assert len(mixed) >= 40


@pytest.mark.parametrize("least", [9, 33])
def test_crowds_are_drawn(least: int) -> None:
    crowded = [case for case in MANY if any(len(step.requests) >= least for step in case.steps)]
    assert 5 <= len(crowded) <= 30


def test_some_crowds_are_behind_prefixes() -> None:
    steps = [step for case in MANY for step in spans_of(case)]
    assert sum(len(step) > 8 and sum(start > 0 for start, _ in step) > 8 for step in steps) >= 3


def test_crowds_are_smaller_where_pages_are_large() -> None:
    plan = Plan(seed=0, cases=300, buckets=BUCKETS, page_size=1024, bounds=BOUNDS)
    counts = [
        len(step.requests) for block in plan.blocks() for c in block.cases for step in c.steps
    ]
    assert 8 < max(counts) <= 16


def test_cases_are_json() -> None:
    (again,) = read_cases(json.dumps(MANY[0].to_json()))
    assert again == MANY[0]


def test_a_case_does_not_depend_on_how_many_there_are() -> None:
    (short,) = Plan(seed=3, cases=5).blocks()
    (longer,) = Plan(seed=3, cases=50).blocks()
    assert longer.cases[:5] == short.cases
    assert (longer.page_size, list(longer.buckets)) == (short.page_size, list(short.buckets))


def test_another_seed_draws_other_cases() -> None:
    one, other = (next(Plan(seed=seed, cases=20).blocks()) for seed in (1, 2))
    assert [case.steps for case in one.cases] != [case.steps for case in other.cases]


def test_every_case_is_in_one_block_under_its_own_name() -> None:
    names = [case.name for block in Plan(seed=4, cases=250).blocks() for case in block.cases]
    assert names == [f"fuzz-4-{number}" for number in range(250)]


def test_blocks_have_ladders_and_page_sizes_of_their_own() -> None:
    blocks = list(Plan(seed=0, cases=10 * BLOCK).blocks())
    assert len({tuple(block.buckets) for block in blocks}) == 10
    assert len({block.page_size for block in blocks}) > 2


def test_page_sizes_are_multiples_of_what_backends_take() -> None:
    blocks = Plan(seed=0, cases=10 * BLOCK, page_multiple=32).blocks()
    assert [block.page_size % 32 for block in blocks] == [0] * 10


def test_a_ladder_and_a_page_size_that_are_given_are_taken() -> None:
    blocks = Plan(seed=0, cases=2 * BLOCK, buckets=BUCKETS, page_size=5).blocks()
    assert [(list(block.buckets), block.page_size) for block in blocks] == [([8, 24], 5)] * 2


def test_no_cases_are_refused() -> None:
    with pytest.raises(HarnessError, match="0 cases are nothing to run"):
        Plan(seed=0, cases=0)


def test_bounds_that_allow_nothing_are_refused() -> None:
    with pytest.raises(HarnessError, match="most_steps is 0"):
        Bounds(most_steps=0)
