"""``--bcg-debug``: the kit with every debug tool on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunKit = Callable[..., Any]
WRITES = ["--bcg-backend-class", "bcg_harness.testing:WritesCache", "--bcg-case", "two-requests"]
FOUND = "changed, of pages ["


@pytest.fixture(scope="module")
def watched(run_kit: RunKit) -> Any:
    return run_kit(*WRITES, "--bcg-debug")


def test_what_a_tool_finds_is_an_error_of_the_case(watched: Any) -> None:
    name = "bcg_harness.testing:WritesCache-kv_isolation-two-requests"
    assert watched.status == 1
    assert watched.outcome_of(name) == "ERROR"
    assert FOUND in watched.output


def test_the_tools_are_named_above_the_tests(watched: Any) -> None:
    assert "pages of 16, watched by all debug tools" in watched.output


def test_without_the_option_no_tool_is_on(run_kit: RunKit) -> None:
    run = run_kit(*WRITES)
    assert run.status == 1
    assert FOUND not in run.output
    assert "debug tools" not in run.output


def test_a_right_backend_passes_and_the_report_tells_that_it_was_watched(
    run_kit: RunKit, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    options = ["--bcg-backend", "right", "--bcg-case", "two-requests", "--bcg-debug"]
    run = run_kit(*options, "--bcg-report", str(report))
    assert run.status == 0, run.output
    assert "9 passed" in run.output
    assert json.loads(report.read_text())["settings"]["debug"] is True
