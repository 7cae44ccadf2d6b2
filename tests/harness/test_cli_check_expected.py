"""``bcg check`` honours what is declared as known to fail, strictly, as the conformance kit does."""

import json
from importlib.metadata import EntryPoint
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, AttentionBackend, BackendRegistry, registry
from bcg_harness import CheckResult, Matrix
from bcg_harness.cli import app
from bcg_harness.testing import MaskBackend, NoFloat32, Raises, ScalesTooMuch

TWO = ["--case", "two-requests"]


class Known(ScalesTooMuch):
    @classmethod
    def expected_failures(cls) -> dict[str, str]:
        return {
            "attention-*": "wrong scale until 2.0",
            "oracle-*": "likewise",
            "full_graph-*": "likewise",
            "nonsense-*": "of old",
        }


class Stale(MaskBackend):
    @classmethod
    def expected_failures(cls) -> dict[str, str]:
        return {"attention-two-requests": "wrong scale until 2.0", "oracle-*": "likewise"}


class Skewed(Raises):
    @classmethod
    def expected_failures(cls) -> dict[str, str]:
        return {"*-two-requests": "takes one request only"}


class Partly(Raises):
    @classmethod
    def expected_failures(cls) -> dict[str, str]:
        return {"oracle-two-requests": "takes one request only"}


class Narrow(NoFloat32):
    @classmethod
    def expected_failures(cls) -> dict[str, str]:
        return {"oracle-two-requests": "wrong scale until 2.0"}


class Mute(MaskBackend):
    @classmethod
    def expected_failures(cls) -> dict[str, str]:
        return {"oracle-*": " "}


TOYS: dict[str, type[AttentionBackend]] = {
    "right": MaskBackend,
    "known": Known,
    "stale": Stale,
    "skewed": Skewed,
    "partly": Partly,
    "narrow": Narrow,
    "mute": Mute,
}


def run(*arguments: str) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        points = {name: [EntryPoint(name, "toy", ENTRY_POINT_GROUP)] for name in TOYS}
        patch.setattr(registry, "_installed", lambda: points)
        patch.setattr(BackendRegistry, "load", lambda self, name: TOYS[name])
        return CliRunner().invoke(app, ["check", "--buckets", "16,64", *arguments])


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    path = tmp_path_factory.mktemp("json") / "out.json"
    result = run("--backend", "known", *TWO, "--json", str(path))
    return result, json.loads(path.read_text())


@pytest.fixture(scope="module")
def stale() -> Result:
    return run("--backend", "stale", *TWO)


# What fails as declared


def test_what_is_expected_to_fail_does_not_fail_the_run(known: Any) -> None:
    assert known[0].exit_code == 0, known[0].output
    assert "6 passed, 0 failed, 3 failed as expected" in known[0].output


def test_the_reason_of_an_expected_failure_is_shown(known: Any) -> None:
    assert "xfail known: wrong scale until 2.0" in known[0].output
    assert "xfail known (2 times): likewise" in known[0].output


def test_a_cell_of_an_expected_failure_says_so(known: Any) -> None:
    lines = (line.strip() for line in known[0].output.splitlines())
    (row,) = [line for line in lines if line.startswith("two-requests")]
    assert row.split().count("xfail") == 3


def test_a_pattern_that_matches_nothing_warns(known: Any) -> None:
    assert "warning expected failure 'nonsense-*' of known matches no test" in known[0].output


def test_json_tells_expected_failures_apart_with_reason_and_measure(known: Any) -> None:
    raw = known[1]
    found = {r["check"]: r for r in raw["results"] if r["outcome"] == "xfailed"}
    assert {check: r["expected"] for check, r in found.items()} == {
        "attention": "wrong scale until 2.0",
        "oracle": "likewise",
        "full_graph": "likewise",
    }
    assert all(r["error"] > r["budget"] for r in found.values())
    assert (raw["summary"]["green"], raw["summary"]["xfailed"]) == (True, 3)


def test_json_lists_what_is_declared_and_warned_of(known: Any) -> None:
    assert known[1]["expected_failures"] == {"known": Known.expected_failures()}
    (warning,) = known[1]["warnings"]
    assert "'nonsense-*' of known" in warning


def test_a_case_that_raises_may_be_expected_as_a_whole() -> None:
    result = run("--backend", "skewed", *TWO)
    assert result.exit_code == 0, result.output
    assert "0 passed, 0 failed, 1 failed as expected" in result.output
    assert "not green" not in result.output


def test_a_case_that_raises_is_an_error_when_only_some_of_its_checks_are_expected() -> None:
    result = run("--backend", "partly", *TWO)
    assert result.exit_code == 1
    assert "ERROR partly / two-requests / step 0: RuntimeError" in result.output


# What does not


def test_a_stale_pattern_fails_and_says_what_to_remove(stale: Result) -> None:
    assert stale.exit_code == 1
    declares = "stale declares that 'attention-two-requests' fails (wrong scale until 2.0)"
    assert f"FAIL stale / expected_failures: {declares}" in stale.output
    assert "remove it from expected_failures()" in stale.output


def test_a_pattern_is_not_stale_when_not_all_its_checks_were_selected(stale: Result) -> None:
    assert "9 passed, 1 failed in" in stale.output


def test_a_pattern_is_not_stale_when_the_backend_cannot_be_used() -> None:
    result = run("--backend", "narrow", "--backend", "right", *TWO)
    assert result.exit_code == 0, result.output
    assert "9 passed, 0 failed, 1 skipped" in result.output


def test_a_pattern_is_not_stale_when_the_run_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_case, calls = Matrix.check_case, count()

    def interrupted(*args: Any) -> list[CheckResult]:
        if next(calls):
            raise KeyboardInterrupt
        return check_case(*args)

    monkeypatch.setattr(Matrix, "check_case", interrupted)
    result = run("--backend", "stale", *TWO, "--case", "one-token")
    assert result.exit_code == 130
    assert "9 passed, 0 failed in" in result.output


def test_an_expected_failure_without_a_reason_is_an_error(tmp_path: Path) -> None:
    result = run("--backend", "mute", "--backend", "right", *TWO)
    assert result.exit_code == 1
    assert "ERROR mute: expected_failures() of mute has 'oracle-*': ' '" in result.output
    assert "9 passed" in result.output
