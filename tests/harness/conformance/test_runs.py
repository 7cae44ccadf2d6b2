"""Each case of each backend runs once, and only when a test asks for it."""

from collections.abc import Callable
from typing import Any

import pytest

from bcg_harness.matrix import Matrix

RunKit = Callable[..., Any]
OPTIONS = [
    "--bcg-backend-class",
    "toys:MaskBackend",
    "--bcg-case",
    "bucket",
    "--bcg-case",
    "one-token",
]


@pytest.fixture
def cases_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that grows with every backend and case that is run."""
    seen = []
    check_case = Matrix.check_case

    def spy(self: Matrix, name: str, probe: Any, case: Any) -> Any:
        seen.append((name, case.name))
        return check_case(self, name, probe, case)

    monkeypatch.setattr(Matrix, "check_case", spy)
    return seen


def test_a_case_runs_once_for_all_its_tests(
    run_kit: RunKit, cases_run: list[tuple[str, str]]
) -> None:
    run = run_kit(*OPTIONS)
    assert "18 passed" in run.output
    assert cases_run == [("toys:MaskBackend", "bucket"), ("toys:MaskBackend", "one-token")]


def test_a_case_of_deselected_tests_does_not_run(
    run_kit: RunKit, cases_run: list[tuple[str, str]]
) -> None:
    run = run_kit(*OPTIONS, "-k", "oracle-one-token or padding-one-token")
    assert "2 passed" in run.output
    assert cases_run == [("toys:MaskBackend", "one-token")]
