"""Verdicts are made from results of steps, and tracebacks are cut down to what matters."""

from importlib import import_module
from traceback import format_exception

import pytest

from bcg_harness.checks import CHECK_NAMES
from bcg_harness.conformance.meanings import MEANINGS
from bcg_harness.conformance.verdict import Verdict, essence
from bcg_harness.outcome import CheckResult, Outcome


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
        ([Outcome.SKIPPED, Outcome.SKIPPED], Outcome.SKIPPED),
    ],
    ids=["nothing", "passed", "one-failed", "unjudged", "unjudged-and-failed", "skipped"],
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


@pytest.mark.parametrize("declared", [True, False])
def test_a_skip_of_a_whole_case_is_declared_where_its_result_says_so(declared: bool) -> None:
    skip = CheckResult.skip("gqa: takes one head", backend="mine", case="a", declared=declared)
    verdict = Verdict.of_whole(skip)
    assert (verdict.outcome, verdict.declared) == (Outcome.SKIPPED, declared)
    assert verdict.reason == "mine, case a: gqa: takes one head"


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


def test_the_essence_leaves_out_what_only_imports() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        import_module("no_such_module")
    text = essence("".join(format_exception(raised.value)))
    assert 'import_module("no_such_module")' in text
    assert "importlib" not in text
    assert text.endswith("ModuleNotFoundError: No module named 'no_such_module'")


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
