"""Verdicts are made from results of steps, and tracebacks are cut down to what matters."""

from traceback import format_exception

import pytest

from bcg_core import TokenBuckets
from bcg_harness.builtin import builtin_cases
from bcg_harness.checks import CHECK_NAMES
from bcg_harness.conformance.meanings import MEANINGS
from bcg_harness.conformance.subjects import applies
from bcg_harness.conformance.verdict import Verdict, essence
from bcg_harness.outcome import CheckResult, Outcome

BUCKETS = TokenBuckets([16, 64])
CASES = {case.name: case for case in builtin_cases(BUCKETS)}


def result(outcome: Outcome, detail: str = "", step: int | None = 0) -> CheckResult:
    return CheckResult(
        outcome=outcome, backend="mine", case="a", check="oracle", step=step, detail=detail
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], Outcome.SKIPPED),
        ([Outcome.PASSED, Outcome.PASSED], Outcome.PASSED),
        ([Outcome.PASSED, Outcome.FAILED], Outcome.FAILED),
        ([Outcome.ERROR, Outcome.PASSED], Outcome.ERROR),
        ([Outcome.ERROR, Outcome.FAILED], Outcome.FAILED),
    ],
    ids=["nothing", "passed", "one-failed", "unjudged", "unjudged-and-failed"],
)
def test_the_worst_step_counts(outcomes: list[Outcome], expected: Outcome) -> None:
    verdict = Verdict.of_steps([result(outcome) for outcome in outcomes], meaning="it is right")
    assert verdict.outcome is expected


def test_every_failed_step_is_told() -> None:
    steps = [
        result(Outcome.FAILED, "too far", step=2),
        result(Outcome.PASSED, "near", step=3),
        result(Outcome.FAILED, "all of it", step=None),
    ]
    verdict = Verdict.of_steps(steps, meaning="it is near")
    assert verdict.reason.splitlines() == [
        "must hold: it is near",
        "step 2: too far",
        "whole case: all of it",
    ]


@pytest.mark.parametrize(
    ("detail", "declared"),
    [
        ("cached_prefix: the backend declares that it serves no cached prefix", True),
        ("devices: runs on cuda, not on cpu", True),
        ("max_positions: the case needs 9 positions, the model has 8", False),
        ("no such library: pip install gone", False),
    ],
    ids=["prefix", "device", "model", "library"],
)
def test_a_skip_is_declared_when_it_names_a_capability(detail: str, declared: bool) -> None:
    verdict = Verdict.of_whole(result(Outcome.SKIPPED, detail))
    assert verdict.declared is declared


def test_the_essence_is_the_innermost_frames_and_the_exception() -> None:
    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        raise KeyError("no such page")

    with pytest.raises(KeyError) as raised:
        fail(9)
    lines = essence("".join(format_exception(raised.value))).splitlines()
    assert len([line for line in lines if line.startswith('  File "')]) == 3
    assert lines[-1] == "KeyError: 'no such page'"


def test_the_essence_of_a_chain_is_what_was_raised_first() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second") from error
    except RuntimeError as error:
        text = essence("".join(format_exception(error)))
    assert text.endswith("KeyError: 'first'")


def test_every_check_has_a_meaning() -> None:
    assert list(MEANINGS) == list(CHECK_NAMES)


@pytest.mark.parametrize(
    ("check", "case", "expected"),
    [
        ("one_pass", "five-chunks", True),
        ("one_pass", "cached-prefixes", False),  # the prefixes come in steps that are not checked
        ("one_pass", "one-request", False),
        ("padding", "one-request", True),
        ("padding", "above-largest", False),
        ("oracle", "above-largest", True),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_apply_is_known_beforehand(check: str, case: str, expected: bool) -> None:
    assert applies(check, CASES[case], BUCKETS) is expected
