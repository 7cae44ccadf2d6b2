"""Failing cases become as small as they go, and stay failing."""

from collections.abc import Callable

import pytest

from bcg_harness import Case, Step
from bcg_harness.fuzz.shrink import join, shrink

Fails = Callable[[Case], bool]


def case_of(*steps: list[tuple[int, int]], unchecked: int = -1) -> Case:
    return Case(
        name="made",
        description="",
        steps=tuple(
            Step(requests=tuple(requests), checked=position != unchecked)
            for position, requests in enumerate(steps)
        ),
    )


LARGE = case_of(
    [(0, 9), (1, 30)], [(2, 17)], [(0, 8), (2, 5), (3, 1)], [], [(1, 12), (4, 40)], [(5, 3)]
)

SMALLEST: dict[str, tuple[Fails, Case]] = {
    "two-requests": (
        lambda case: any(len(step.requests) > 1 for step in case.steps),
        case_of([(1, 1), (4, 1)]),
    ),
    "a-prefix": (lambda case: case.has_prefix, case_of([(2, 1)], [(2, 1)])),
    "nobody": (lambda case: any(not step.requests for step in case.steps), case_of([])),
    "many-tokens": (
        lambda case: any(step.num_tokens >= 11 for step in case.steps),
        case_of([(4, 11)]),
    ),
    "anything": (lambda case: True, case_of([])),
}


@pytest.mark.parametrize(("fails", "smallest"), SMALLEST.values(), ids=SMALLEST)
def test_the_smallest_case_is_found(fails: Fails, smallest: Case) -> None:
    assert shrink(LARGE, fails) == smallest


def test_a_case_that_is_as_small_as_it_goes_stays() -> None:
    assert shrink(LARGE, lambda case: case == LARGE) == LARGE


def weight(case: Case) -> int:
    return sum(1 + len(step.requests) + step.num_tokens for step in case.steps)


def test_every_case_that_is_tried_is_smaller() -> None:
    tried: list[Case] = []
    shrink(LARGE, lambda case: bool(tried.append(case)))
    assert len(tried) > 20
    assert max(map(weight, tried)) < weight(LARGE)


def test_a_shrink_ends_after_so_many_attempts() -> None:
    tried: list[Case] = []
    shrink(LARGE, lambda case: bool(tried.append(case)), attempts=7)
    assert len(tried) == 7


def test_a_case_that_checks_nothing_is_not_tried() -> None:
    case = case_of([(0, 2)], [(0, 3)], unchecked=0)
    assert shrink(case, lambda smaller: len(smaller.steps) < 2) == case_of([])


def test_joined_cases_do_not_share_sequences() -> None:
    joined = join([case_of([(0, 2), (3, 1)], [(0, 4)]), case_of([]), case_of([(0, 5), (1, 6)])])
    assert [step.requests for step in joined.steps] == [
        ((0, 2), (3, 1)),
        ((0, 4),),
        (),
        ((4, 5), (5, 6)),
    ]


def test_joined_cases_check_what_each_checks() -> None:
    joined = join([case_of([(0, 2)], [(0, 3)], unchecked=0), case_of([(0, 1)])])
    assert [step.checked for step in joined.steps] == [False, True, True]


def test_a_single_case_joins_to_itself() -> None:
    assert join([LARGE]) == LARGE
