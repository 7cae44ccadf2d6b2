"""Known failures are strict, pattern by pattern: declared with a reason, and removed when they are repaired."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunKit = Callable[..., Any]
TWO = ["--bcg-case", "two-requests"]


@pytest.fixture(scope="module")
def known_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("known") / "report.json"


@pytest.fixture(scope="module")
def known(run_kit: RunKit, known_report: Path) -> Any:
    return run_kit("--bcg-backend", "known", *TWO, "--bcg-report", str(known_report))


@pytest.fixture(scope="module")
def stale(run_kit: RunKit) -> Any:
    return run_kit("--bcg-backend", "stale", *TWO)


def test_what_is_expected_to_fail_does_not_fail_the_run(known: Any) -> None:
    assert known.status == 0, known.output
    assert "3 failed as expected" in known.output


def test_the_reason_of_an_expected_failure_is_shown(known: Any) -> None:
    assert "test_backend[known-attention-two-requests] - wrong scale until 2.0" in known.output


def test_the_report_tells_expected_failures_apart(known: Any, known_report: Path) -> None:
    content = json.loads(known_report.read_text())
    found = {r["check"]: r["expected"] for r in content["results"] if r["outcome"] == "xfailed"}
    assert found == {
        "attention": "wrong scale until 2.0",
        "oracle": "likewise",
        "full_graph": "likewise",
    }
    assert content["expected_failures"]["known"]["nonsense-*"] == "of old"
    assert content["summary"]["green"] is True


def test_a_pattern_that_matches_nothing_warns(known: Any) -> None:
    assert "expected failure 'nonsense-*' of known matches no test" in known.output


def test_a_stale_pattern_fails_and_says_what_to_remove(stale: Any) -> None:
    assert stale.status == 1
    assert (
        "stale declares that 'attention-two-requests' fails (wrong scale until 2.0)" in stale.output
    )
    assert "remove it from expected_failures()" in stale.output


def test_a_pattern_is_not_stale_when_not_all_its_tests_were_selected(
    stale: Any,
) -> None:
    assert "1 failed" in stale.output
    assert "not all tests that the pattern matches were selected" in stale.output


def test_what_raises_may_be_expected_too(run_kit: RunKit) -> None:
    run = run_kit("--bcg-backend", "skewed", *TWO)
    assert run.status == 0, run.output
    assert "9 failed as expected" in run.output
