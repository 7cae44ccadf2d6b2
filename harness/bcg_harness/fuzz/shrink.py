"""Make a failing case smaller, step by step, while it still fails."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bcg_harness.cases import Case, Step
from bcg_harness.errors import CaseError

MOST_ATTEMPTS = 200
"""Runs that a shrink may cost; small cases need fewer, and slow machines should end some time."""

Steps = tuple[Step, ...]


def shrink(case: Case, fails: Callable[[Case], bool], *, attempts: int = MOST_ATTEMPTS) -> Case:
    """Return the smallest case that was found to fail like ``case``, which must fail itself.

    Greedy: drops steps, then requests, then lowers lengths, and starts again until nothing smaller fails.
    """
    left = attempts

    def attempt(steps: Steps) -> bool:
        nonlocal case, left
        try:
            smaller = replace(case, steps=steps)
        except CaseError:
            return False  # nothing left to check
        left -= 1
        if left < 0 or not fails(smaller):
            return False
        case = smaller
        return True

    before = None
    while case != before and left > 0:
        before = case
        for candidates in (_halves, _without_a_step, _without_a_request, _with_fewer_tokens):
            place = 0
            # What follows a success is tried at the same place, where there is something else now.
            while (smaller := candidates(case.steps, place)) is not None:
                if not any(map(attempt, smaller)):
                    place += 1
    return case


def join(cases: Sequence[Case]) -> Case:
    """Return one case that does what ``cases`` do one after the other, under the last one's name.

    Sequences are renumbered, so that no case goes on behind the tokens of another.
    """
    steps: list[Step] = []
    first = 0
    for case in cases:
        for step in case.steps:
            requests = tuple((first + sequence, tokens) for sequence, tokens in step.requests)
            steps.append(replace(step, requests=requests))
        first += max(case.lengths, default=-1) + 1
    return replace(cases[-1], steps=tuple(steps))


# Each returns what to try at a place, the smallest first, or None behind the last place.


def _halves(steps: Steps, place: int) -> Iterator[Steps] | None:
    half = len(steps) // 2
    return iter((steps[half:], steps[:half])) if half > 1 and place == 0 else None


def _without_a_step(steps: Steps, place: int) -> Iterator[Steps] | None:
    return iter([steps[:place] + steps[place + 1 :]]) if place < len(steps) else None


def _without_a_request(steps: Steps, place: int) -> Iterator[Steps] | None:
    found = _request(steps, place)
    if found is None:
        return None
    position, number = found
    requests = steps[position].requests
    return iter([_with(steps, position, requests[:number] + requests[number + 1 :])])


def _with_fewer_tokens(steps: Steps, place: int) -> Iterator[Steps] | None:
    found = _request(steps, place)
    if found is None:
        return None
    position, number = found
    requests = steps[position].requests
    sequence, tokens = requests[number]
    return (
        _with(steps, position, (*requests[:number], (sequence, fewer), *requests[number + 1 :]))
        for fewer in sorted({1, tokens // 2, tokens - 1} - {0, tokens})
    )


def _request(steps: Steps, place: int) -> tuple[int, int] | None:
    """Return step and number of request ``place``, counted over all steps; None when there are fewer."""
    places = [
        (position, number)
        for position, step in enumerate(steps)
        for number in range(len(step.requests))
    ]
    return places[place] if place < len(places) else None


def _with(steps: Steps, position: int, requests: tuple[tuple[int, int], ...]) -> Steps:
    smaller = replace(steps[position], requests=requests)
    return (*steps[:position], smaller, *steps[position + 1 :])
