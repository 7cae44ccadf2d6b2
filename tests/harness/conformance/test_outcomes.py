"""The kit tells right backends from wrong ones, and says why: each outcome is proved by a toy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bcg_harness import CHECK_NAMES

RunKit = Callable[..., Any]
CHECKS = [name for name in CHECK_NAMES if name != "one_pass"]


@pytest.fixture(scope="module")
def mixed(run_kit: RunKit, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Run two cases of toys that each end in another way; returns the run and its report."""
    report = tmp_path_factory.mktemp("report") / "report.json"
    names = ["right", "wrong", "raising", "narrow", "gone", "mute", "unmade"]
    backends = [f"--bcg-backend={name}" for name in names]
    cases = ["--bcg-case", "two-requests", "--bcg-case", "two-chunks"]
    run = run_kit(*backends, *cases, "--bcg-report", str(report))
    return run, json.loads(report.read_text())


@pytest.mark.parametrize("check", [*CHECKS, "one_pass"])
def test_a_right_backend_passes_every_check(mixed: Any, check: str) -> None:
    assert mixed[0].outcome_of(f"right-{check}-two-chunks") == "PASSED"


def test_a_check_that_cannot_apply_is_not_collected(mixed: Any) -> None:
    assert "one_pass-two-chunks" in mixed[0].output
    assert "one_pass-two-requests" not in mixed[0].output


def test_a_wrong_backend_fails_where_it_is_wrong(mixed: Any) -> None:
    outcomes = {
        check: mixed[0].outcome_of(f"wrong-{check}-two-requests")
        for check in ("attention", "oracle", "bit_equal", "structure")
    }
    assert outcomes == {
        "attention": "FAILED",
        "oracle": "FAILED",
        "bit_equal": "PASSED",
        "structure": "PASSED",
    }


def test_a_failure_says_what_must_hold_and_what_was_found(mixed: Any) -> None:
    assert "must hold: each layer's attention is, within a budget" in mixed[0].output
    assert "exceeds its budget" in mixed[0].output


@pytest.mark.parametrize("check", CHECKS)
def test_a_case_that_raises_is_an_error_of_all_its_tests(mixed: Any, check: str) -> None:
    assert mixed[0].outcome_of(f"raising-{check}-two-requests") == "ERROR"


def test_a_case_behind_one_that_raises_is_judged(mixed: Any) -> None:
    assert mixed[0].outcome_of("raising-oracle-two-chunks") == "PASSED"


def test_what_is_raised_is_shown_once_with_its_place(mixed: Any) -> None:
    # In CI pytest repeats whole messages in its summary.
    output = mixed[0].output.partition("short test summary info")[0]
    assert output.count('raise RuntimeError("one request at a time, please")') == 1
    assert "raising, case two-requests, step 0: RuntimeError: one request at a time" in output


def test_a_backend_that_cannot_be_made_is_an_error_of_its_first_test(mixed: Any) -> None:
    assert mixed[0].outcome_of("unmade-bit_equal-two-requests") == "ERROR"
    assert mixed[0].outcome_of("unmade-structure-two-chunks") == "SKIPPED"
    assert "MemoryError: no workspace (toys.py:" in mixed[0].output


def test_a_declared_limit_skips_and_names_the_capability(mixed: Any) -> None:
    assert mixed[0].outcome_of("narrow-oracle-two-requests") == "SKIPPED"
    assert "dtypes: takes bfloat16, not float32" in mixed[0].output


def test_a_backend_asked_for_by_name_and_missing_is_an_error_with_the_hint(mixed: Any) -> None:
    assert mixed[0].outcome_of("gone") == "ERROR"
    assert "pip install gone" in mixed[0].output


def test_an_expected_failure_without_a_reason_is_an_error(mixed: Any) -> None:
    assert mixed[0].outcome_of("mute") == "ERROR"
    assert "say why it fails" in mixed[0].output


def test_a_run_with_failures_exits_with_1(mixed: Any) -> None:
    assert mixed[0].status == 1


def test_backends_are_listed_with_the_versions_of_their_distributions(mixed: Any) -> None:
    assert "unmade, wrong (toy-backends 3.1.4)" in mixed[0].output
    assert "bcg runs on: CPU emulator" in mixed[0].output


def test_a_class_of_another_name_than_it_is_registered_under_is_noted_once(mixed: Any) -> None:
    note = "bcg note: registered as 'right', but its class has name = 'mask'"
    assert mixed[0].output.count(note) == 1


def test_the_summary_counts_what_was_checked_and_what_was_not(mixed: Any) -> None:
    # Tests of two cases: all of "right" and "wrong", the second case of "raising".
    assert "48 checks run on CPU (emulated graphs), 0 on GPU" in mixed[0].output
    assert "19 by declaration, 0 by environment; 30 could not be judged" in mixed[0].output


def test_the_report_has_the_form_of_bcg_check(mixed: Any) -> None:
    report = mixed[1]
    assert report["model"]["name"] == "tiny"
    assert report["buckets"] == [16, 64]
    assert {case["name"] for case in report["cases"]} == {"two-requests", "two-chunks"}
    wrong = [r for r in report["results"] if r["backend"] == "wrong" and r["check"] == "attention"]
    assert {result["outcome"] for result in wrong} == {"failed"}
    assert all(result["error"] > result["budget"] for result in wrong)


def test_the_report_counts_tests_and_is_not_green(mixed: Any) -> None:
    summary, tests = mixed[1]["summary"], mixed[1]["tests"]
    assert (summary["green"], summary["interrupted"]) == (False, False)
    assert tests["passed"] + tests["failed"] == 48
    assert (tests["skipped"], tests["error"]) == (37, 12)


def test_what_stands_for_a_whole_case_is_reported_once(mixed: Any) -> None:
    raised = [r for r in mixed[1]["results"] if r["backend"] == "raising" and "traceback" in r]
    assert len(raised) == 1


def test_a_right_backend_alone_is_green(run_kit: RunKit, tmp_path: Path) -> None:
    case = tmp_path / "mine.json"
    case.write_text('{"name": "mine", "steps": [{"requests": [[0, 5], [1, 7]]}]}')
    options = ["--bcg-backend-class", "toys:MaskBackend", "--bcg-page-size", "8"]
    report = tmp_path / "out.json"
    run = run_kit(*options, "--bcg-case", str(case), "--bcg-report", str(report), "--bcg-seed=3")
    content = json.loads(report.read_text())
    assert run.status == 0, run.output
    assert "9 passed" in run.output
    assert content["summary"]["green"] is True
    assert content["settings"] == {"page_size": 8, "seed": 3, "text": None, "debug": False}


def test_a_class_is_found_in_the_current_directory(run_kit: RunKit, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("from bcg_harness.testing import MaskBackend as Mine")
    options = ["--bcg-backend-class", "kernel:Mine", "--bcg-case", "one-token"]
    run = run_kit(*options, "-k", "bit_equal", folder=tmp_path)
    assert run.outcome_of("kernel:Mine-bit_equal-one-token") == "PASSED"


def test_a_run_of_skips_alone_fails_and_says_so(run_kit: RunKit) -> None:
    run = run_kit("-k", "gone or torch_varlen")
    assert run.status == 1, run.output
    assert run.outcome_of("gone") == "SKIPPED"
    assert "pip install gone" in run.output
    assert "torch_varlen: devices: runs on cuda, not on cpu (try --bcg-device cuda)" in run.output
    assert "1 by declaration, 1 by environment" in run.output
    assert "nothing was checked" in run.output


def test_a_broken_entry_point_is_an_error_of_its_own(run_kit: RunKit) -> None:
    run = run_kit("-k", "broken or right-bit_equal-one-token")
    assert run.outcome_of("broken") == "ERROR"
    assert run.outcome_of("right-bit_equal-one-token") == "PASSED"
    assert "No module named 'no_such_module'" in run.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bcg-backend", "rihgt"], "known backends: auto, broken"),
        (["--bcg-backend-class", "toys"], "not of the form module:Class"),
        (["--bcg-case", "two"], "known cases: one-request"),
        (["--bcg-buckets", "many"], "no whole numbers"),
        (["--bcg-dtype", "int8"], "possible are float32"),
        (["--bcg-page-size", "0"], "a page holds at least one token"),
        (["--bcg-report", "no/such/folder.json"], "cannot write"),
        (["--bcg-backend", "right", "--bcg-model", "huge"], "huge: no such directory"),
    ],
    ids=["backend", "class", "case", "buckets", "dtype", "page-size", "report", "model"],
)
def test_wrong_use_is_told_once(run_kit: RunKit, arguments: list[str], words: str) -> None:
    run = run_kit(*arguments)
    output = run.output
    assert run.status in (2, 4), output
    assert words in output
    assert "Traceback" not in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_a_gpu_that_is_required_and_missing_is_an_error(run_kit: RunKit) -> None:
    run = run_kit("--bcg-backend", "right", "--bcg-require-cuda")
    assert run.status == 2
    assert "sees 0 GPUs" in run.output
    assert "skipped" not in run.output


def test_collecting_alone_runs_nothing(run_kit: RunKit) -> None:
    run = run_kit("--bcg-backend", "right", "--collect-only", "--bcg-model", "huge")
    assert run.status == 0, run.output
    assert "test_backend[right-one_pass-five-chunks]" in run.output
    assert "bcg conformance:" not in run.output
