"""What is declared as known to fail is matched, marked and kept strict."""

from collections.abc import Mapping
from typing import Any

import pytest

from bcg_core import TokenBuckets
from bcg_harness import Candidate, CheckResult, Outcome, builtin_cases
from bcg_harness.expected_failures import Expectations, expectations_of
from bcg_harness.testing import MaskBackend

BUCKETS = TokenBuckets([16, 64])
CASES = {case.name: case for case in builtin_cases(BUCKETS)}
PASSED, FAILED, SKIPPED, ERROR = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.ERROR


def candidate(declared: Any) -> Candidate:
    class Declares(MaskBackend):
        @classmethod
        def expected_failures(cls) -> Mapping[str, str]:
            if isinstance(declared, Exception):
                raise declared
            return declared  # type: ignore[no-any-return]

    return Candidate(name="mine", backend=Declares)


def declare(patterns: dict[str, str], *cases: str) -> Expectations:
    return Expectations.of(candidate(patterns), [CASES[name] for name in cases], BUCKETS)


def result(
    outcome: Outcome, check: str | None = "oracle", case: str | None = "two-requests"
) -> CheckResult:
    return CheckResult(outcome=outcome, backend="mine", check=check, case=case, detail="too far")


# Marking


@pytest.mark.parametrize(
    ("pattern", "check", "case"),
    [
        ("oracle-two-requests", "oracle", "two-requests"),
        ("oracle-*", "oracle", "two-requests"),
        ("*-two-requests", None, "two-requests"),
        ("*", None, None),
    ],
    ids=["id", "check", "whole-case", "whole-backend"],
)
@pytest.mark.parametrize("outcome", [FAILED, ERROR], ids=str)
def test_what_is_bad_and_expected_is_marked_with_the_reason(
    pattern: str, check: str | None, case: str | None, outcome: Outcome
) -> None:
    marked = declare({pattern: "until 2.0"}, "two-requests").mark(result(outcome, check, case))
    assert (marked.outcome, marked.expected) == (Outcome.XFAILED, "until 2.0")
    assert marked.detail == "too far"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("attention-*", result(FAILED)),
        ("oracle-two-chunks", result(FAILED)),
        ("oracle-*", result(ERROR, None)),
        ("oracle-*", result(ERROR, None, None)),
        ("*", result(PASSED)),
        ("*", result(SKIPPED, None)),
    ],
    ids=["check", "case", "part-of-a-case", "part-of-a-backend", "passed", "skipped"],
)
def test_everything_else_stays_as_it_is(pattern: str, found: CheckResult) -> None:
    assert declare({pattern: "until 2.0"}, "two-requests", "two-chunks").mark(found) is found


def test_a_whole_case_has_the_reasons_of_all_its_checks() -> None:
    patterns = {"oracle-*": "scale", "attention-*": "scale", "*-two-requests": "one request only"}
    marked = declare(patterns, "two-requests").mark(result(ERROR, None))
    assert marked.expected is not None
    assert sorted(marked.expected.split("; ")) == ["one request only", "scale"]


def test_of_several_patterns_the_first_counts() -> None:
    declared = declare({"oracle-*": "first", "*-two-requests": "second"}, "two-requests")
    assert declared.mark(result(FAILED)).expected == "first"


# Strictness


@pytest.mark.parametrize(
    ("cases", "outcomes", "expected"),
    [
        (["two-chunks", "five-chunks"], [PASSED, FAILED], PASSED),
        (["two-chunks", "five-chunks"], [PASSED, ERROR], PASSED),
        (["two-chunks", "five-chunks"], [PASSED, PASSED], FAILED),
        (["two-chunks", "five-chunks"], [PASSED, SKIPPED], FAILED),
        (["two-chunks", "five-chunks"], [SKIPPED, SKIPPED], SKIPPED),
        (["two-chunks"], [PASSED], SKIPPED),
        (["two-chunks"], [FAILED], PASSED),
        ([], [], SKIPPED),
    ],
    ids=["fails", "raises", "stale", "stale-in-part", "not-run", "some", "some-fail", "none"],
)
def test_a_pattern_is_stale_once_all_that_it_matches_passes(
    cases: list[str], outcomes: list[Outcome], expected: Outcome
) -> None:
    declared = declare({"one_pass-*-chunks": "until 2.0"}, *cases)
    outcome, reason = declared.judge(declared.known[0], outcomes)
    assert outcome is expected
    assert bool(reason) is (expected is not PASSED)


@pytest.mark.parametrize(
    ("found", "is_stale"),
    [
        ([result(PASSED), result(PASSED)], True),
        ([result(PASSED), result(FAILED)], False),
        ([result(PASSED), result(ERROR, None)], False),
        ([result(ERROR, None, None)], False),
        ([result(SKIPPED, None)], False),
        ([result(PASSED), result(FAILED, "attention")], True),
    ],
    ids=["passes", "step-fails", "case-raises", "backend-raises", "case-skipped", "other-check"],
)
def test_staleness_is_found_in_the_results_of_a_run(
    found: list[CheckResult], is_stale: bool
) -> None:
    stale = declare({"oracle-two-requests": "until 2.0"}, "two-requests").stale(found)
    assert [(r.outcome, r.check, r.case) for r in stale] == [
        (FAILED, "expected_failures", None)
    ] * is_stale


# Declarations


def test_a_pattern_over_a_case_that_was_left_out_is_no_stray() -> None:
    assert declare({"oracle-two-chunks": "until 2.0"}, "two-requests").warnings() == []


@pytest.mark.parametrize(
    "pattern", ["oracel-*", "one_pass-two-requests"], ids=["typo", "cannot-apply"]
)
def test_a_pattern_that_can_match_nothing_is_warned_of_and_not_judged(pattern: str) -> None:
    declared = declare({pattern: "until 2.0"}, "two-requests")
    (warning,) = declared.warnings()
    assert warning.startswith(f"expected failure {pattern!r} of mine matches no test")
    assert declared.in_force() == []


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (["oracle-*"], "has to map patterns over 'check-case' to reasons"),
        ({"oracle-*": " "}, "say why it fails"),
        ({"oracle-*": None}, "say why it fails"),
        (KeyError("oops"), "KeyError: 'oops'"),
    ],
    ids=["list", "blank", "none", "raises"],
)
def test_what_is_declared_wrongly_is_an_error_of_its_backend_alone(
    declared: Any, message: str
) -> None:
    right = candidate({})
    found, broken = expectations_of([candidate(declared), right], [], BUCKETS)
    assert [each for each, _ in found] == [right]
    assert [(r.outcome, r.backend) for r in broken] == [(ERROR, "mine")]
    assert message in broken[0].detail
