"""A run is green only if something passed and nothing failed."""

import json
import math
import re

import pytest

from bcg_core import CaptureError
from bcg_harness import CheckResult, Comparison, Outcome, is_green, tally
from bcg_harness.outcome import Finding, describe


def results(*outcomes: Outcome) -> list[CheckResult]:
    return [CheckResult(outcome=outcome, backend="b") for outcome in outcomes]


@pytest.mark.parametrize(
    ("outcomes", "green"),
    [
        pytest.param((Outcome.PASSED,), True, id="passed"),
        pytest.param((Outcome.PASSED, Outcome.SKIPPED), True, id="passed-and-skipped"),
        pytest.param((Outcome.PASSED, Outcome.FAILED), False, id="failed"),
        pytest.param((Outcome.PASSED, Outcome.ERROR), False, id="error"),
        pytest.param((Outcome.SKIPPED,), False, id="all-skipped"),
        pytest.param((Outcome.PASSED, Outcome.XFAILED), True, id="passed-and-expected"),
        pytest.param((Outcome.XFAILED,), True, id="all-expected"),
        pytest.param((Outcome.XFAILED, Outcome.FAILED), False, id="expected-and-failed"),
        pytest.param((), False, id="nothing"),
    ],
)
def test_green_needs_a_pass_and_no_failure(outcomes: tuple[Outcome, ...], green: bool) -> None:
    assert is_green(results(*outcomes)) is green


def test_tally_counts() -> None:
    assert tally(results(Outcome.PASSED, Outcome.PASSED, Outcome.ERROR)) == {
        Outcome.PASSED: 2,
        Outcome.ERROR: 1,
    }


def test_a_comparison_beyond_its_budget_fails() -> None:
    finding = Finding.of("oracle", Comparison(error=2e-3, budget=1e-3, what="request 1"))
    assert not finding.passed
    assert finding.detail == "request 1: error 2.00e-03 exceeds its budget 1.00e-03"


def test_json_has_no_infinity() -> None:
    finding = Finding.of("oracle", Comparison(error=math.inf, budget=1e-3, what="request 1"))
    raw = CheckResult.of(finding, backend="b", case="c", step=2).to_json()
    assert raw["error"] is None
    assert raw["outcome"] == "failed"


@pytest.mark.parametrize("budget", [math.inf, math.nan, 0.6])
def test_a_budget_that_cannot_judge_is_an_error(budget: float) -> None:
    finding = Finding.of("oracle", Comparison(error=1e-3, budget=budget, what="request 1"))
    result = CheckResult.of(finding, backend="b", case="c", step=2)
    assert result.outcome is Outcome.ERROR
    assert result.detail.startswith("request 1: cannot be judged: budget ")
    json.dumps(result.to_json(), allow_nan=False)


def test_an_error_is_described_with_the_place_where_it_was_raised() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        math.fmod(1, 1 // 0)
    assert re.fullmatch(r"ZeroDivisionError: .* \(test_outcome\.py:\d+\)", describe(caught.value))


def test_a_broken_result_keeps_the_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        math.fmod(1, 1 // 0)
    raw = CheckResult.broken(caught.value, backend="b", case="c", step=1).to_json()
    assert raw["outcome"] == "error"
    assert "math.fmod(1, 1 // 0)" in raw["traceback"]


def test_an_error_is_described_with_its_notes() -> None:
    error = RuntimeError("no")
    error.add_note("raised at replay in break 3")
    assert describe(error) == "RuntimeError: no; raised at replay in break 3"


def test_our_own_errors_speak_for_themselves() -> None:
    assert describe(CaptureError("capture first")) == "capture first"


def test_of_many_problems_the_first_few_are_named_once() -> None:
    finding = Finding.listing("structure", ["a", "a", "b", "c", "d", "e"])
    assert not finding.passed
    assert finding.detail == "a; b; c; and 2 more"


def test_no_problem_is_a_pass() -> None:
    assert Finding.listing("structure", []).passed
