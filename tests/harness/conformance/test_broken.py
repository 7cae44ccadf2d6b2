"""A backend that cannot be used at all is one error, whatever it raises and wherever; nothing else hides it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunKit = Callable[..., Any]
TWO = ["--bcg-case", "two-requests"]
TOYS = """
import pytest
from bcg_harness.testing import MaskBackend


class SkipsWhenMade(MaskBackend):
    def __init__(self, spec, limits, device):
        pytest.skip("no device")


class SkipsWhenWarm(MaskBackend):
    def warm_up(self, batches, run):
        pytest.skip("no device")


class SkipsInOneCase(MaskBackend):
    def init_forward_metadata(self, batch):
        if batch.num_requests == 2:
            pytest.skip("two are too many")
        return super().init_forward_metadata(batch)


class XfailsInOneCase(MaskBackend):
    def init_forward_metadata(self, batch):
        if batch.num_requests == 2:
            pytest.xfail("two are too many")
        return super().init_forward_metadata(batch)


class SkipsWhenAsked(MaskBackend):
    @classmethod
    def expected_failures(cls):
        pytest.skip("nobody knows")


class ExpectedInPart(SkipsWhenMade):
    @classmethod
    def expected_failures(cls):
        return {"bit_equal-*": "no device yet"}


class ExpectedAsAWhole(SkipsWhenMade):
    @classmethod
    def expected_failures(cls):
        return {"*": "no device yet"}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_toys.py").write_text(TOYS)
    (folder / "skips_at_import.py").write_text("import pytest\npytest.importorskip('no_such_lib')")
    return folder


@pytest.fixture(scope="module")
def check(run_kit: RunKit, folder: Path) -> RunKit:
    def check(name: str, *arguments: str) -> Any:
        options = ["--bcg-backend-class", name, *TWO, *arguments]
        return run_kit(*options, folder=folder)

    return check


@pytest.fixture(scope="module")
def made(check: RunKit, folder: Path) -> Any:
    return check("broken_toys:SkipsWhenMade", "--bcg-report", str(folder / "report.json"))


def test_its_first_test_says_why(made: Any) -> None:
    assert made.status == 1
    assert made.outcome_of("broken_toys:SkipsWhenMade-bit_equal-two-requests") == "ERROR"
    assert "broken_toys:SkipsWhenMade: Skipped: no device" in made.output
    # In CI pytest repeats whole messages in its summary.
    shown = made.output.partition("short test summary info")[0]
    assert shown.count('pytest.skip("no device")') == 1


def test_its_other_tests_are_skipped_and_name_the_first(made: Any) -> None:
    assert made.outcome_of("broken_toys:SkipsWhenMade-oracle-two-requests") == "SKIPPED"
    first = "broken_toys:SkipsWhenMade-bit_equal-two-requests"
    assert f"broken_toys:SkipsWhenMade cannot be used, see {first}" in made.output


def test_its_tests_count_as_not_judged(made: Any, folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    tests = report["tests"]
    assert report["summary"]["green"] is False
    assert tests["error"] == 1
    assert f"0 by environment; {1 + tests['skipped']} could not be judged" in made.output


def test_the_first_test_that_is_selected_says_why(check: RunKit) -> None:
    run = check("broken_toys:SkipsWhenMade", "-k", "padding or oracle")
    assert run.status == 1
    assert "1 skipped, " in run.output
    assert "1 error" in run.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken_toys:SkipsWhenWarm-bit_equal-two-requests", "Skipped: no device"),
        ("broken_toys:SkipsInOneCase-oracle-two-requests", "Skipped: two are too many"),
        ("broken_toys:XfailsInOneCase-oracle-two-requests", "XFailed: two are too many"),
        ("broken_toys:SkipsWhenAsked", "Skipped: nobody knows"),
        ("skips_at_import:Backend", "Skipped: could not import 'no_such_lib'"),
        ("no_such_module:Backend", "No module named 'no_such_module'"),
    ],
    ids=["warm-up", "forward", "xfail", "expected_failures", "import", "no-module"],
)
def test_an_outcome_of_pytest_that_a_plug_in_raises_is_an_error(
    check: RunKit, name: str, words: str
) -> None:
    run = check(name.partition("-")[0])
    assert run.status == 1, run.output
    assert run.outcome_of(name) == "ERROR"
    assert words in run.output


def test_a_class_that_does_not_load_is_called_a_class_without_frames_of_importlib(
    check: RunKit,
) -> None:
    run = check("no_such_module:Backend")
    assert "class 'no_such_module:Backend', which no distribution registers, failed" in run.output
    assert "importlib" not in run.output


def test_a_part_that_is_expected_to_fail_does_not_hide_the_error(check: RunKit) -> None:
    run = check("broken_toys:ExpectedInPart")
    assert run.status == 1, run.output
    assert run.outcome_of("broken_toys:ExpectedInPart-bit_equal-two-requests") == "XFAIL"
    assert run.outcome_of("broken_toys:ExpectedInPart-raw_shape-two-requests") == "ERROR"


def test_all_of_it_may_be_expected_to_fail(check: RunKit) -> None:
    run = check("broken_toys:ExpectedAsAWhole")
    assert run.status == 0, run.output
    assert "SKIPPED" not in run.output
