"""Steps are cut where no request goes on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg_harness import Step
from bcg_harness.bench.scheduler import Request, pack
from bcg_harness.bench.stretches import cut


def steps(*batches: dict[int, int]) -> list[Step]:
    return [Step(requests=tuple(batch.items())) for batch in batches]


def sizes(found: list[Step], least: int, cached: dict[int, int] | None = None) -> list[int]:
    return [len(stretch) for stretch in cut(found, least, cached=cached)]


@pytest.mark.parametrize(
    ("least", "expected"),
    [(1, [1, 1, 1, 1]), (20, [2, 2]), (30, [3, 1]), (1000, [4])],
    ids=["each", "two", "three", "all"],
)
def test_a_stretch_ends_when_it_has_enough_tokens(least: int, expected: list[int]) -> None:
    assert sizes(steps({0: 10}, {1: 10}, {2: 10}, {3: 10}), least) == expected


def test_a_stretch_ends_with_no_request_that_goes_on() -> None:
    assert sizes(steps({0: 10}, {0: 10, 1: 5}, {1: 5}, {2: 10}), 1) == [3, 1]


def test_cached_tokens_count_with_the_first_step_of_their_sequence() -> None:
    assert sizes(steps({0: 5}, {1: 5}, {1: 5}, {2: 5}), 12, {0: 10, 1: 10}) == [1, 2, 1]


def test_nothing_is_in_no_stretch() -> None:
    assert list(cut([], 1)) == []


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    prefix=st.integers(0, 30),
    budget=st.integers(1, 60),
    least=st.integers(1, 300),
)
def test_stretches_are_all_steps_in_order_and_share_no_sequence(
    prompts: list[int], prefix: int, budget: int, least: int
) -> None:
    requests = [Request(prompt_tokens=tokens, prefix_tokens=prefix) for tokens in prompts]
    packed = pack(requests, token_budget=budget, max_requests=4, stretch_tokens=least)
    found = list(cut(packed, least))
    assert [step for stretch in found for step in stretch] == list(packed)
    seen = [{sequence for step in stretch for sequence, _ in step.requests} for stretch in found]
    assert sum(map(len, seen)) == len(set().union(*seen)) == len(prompts)
    assert all(any(step.checked for step in stretch) for stretch in found)
