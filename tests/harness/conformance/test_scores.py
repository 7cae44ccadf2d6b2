"""Results that several tests were judged from are kept once, however many there are."""

from time import perf_counter

import pytest

from bcg_harness import CheckResult, Outcome
from bcg_harness.candidates import Candidate
from bcg_harness.conformance.scores import Scores
from bcg_harness.conformance.subjects import CheckOfCase
from bcg_harness.conformance.verdict import Verdict
from bcg_harness.testing import MaskBackend

SUBJECT = CheckOfCase(
    candidate=Candidate(name="mask", backend=MaskBackend), check="oracle", case="one-token"
)


def result(step: int = 0) -> CheckResult:
    return CheckResult(
        outcome=Outcome.PASSED, backend="mask", case="one-token", check="oracle", step=step
    )


def add(scores: Scores, *results: CheckResult) -> None:
    report = pytest.TestReport(
        nodeid="x",
        location=("x", 0, "x"),
        keywords={},
        outcome="passed",
        longrepr=None,
        when="call",
    )
    scores.add(SUBJECT, Verdict(outcome=Outcome.PASSED, results=results), report)


def test_a_result_that_another_test_was_judged_from_is_kept_once() -> None:
    scores, shared = Scores(), result()
    add(scores, shared, result(1))
    add(scores, shared, result(2))
    assert [each.step for each in scores.results] == [0, 1, 2]
    assert scores.knows(shared)


def test_an_equal_result_of_another_test_is_another() -> None:
    scores = Scores()
    add(scores, result())
    assert not scores.knows(result())
    add(scores, result())
    assert len(scores.results) == 2


def test_many_results_are_looked_up_at_once() -> None:
    scores, begun = Scores(), perf_counter()
    for _ in range(300):
        add(scores, *(result(step) for step in range(100)))
    assert len(scores.results) == 30_000
    assert perf_counter() - begun < 5  # looking through all for each took 450 million comparisons
