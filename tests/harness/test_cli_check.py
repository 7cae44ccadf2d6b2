"""``bcg check``: what it prints, what it writes, and how it exits."""

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, registry
from bcg_harness import CHECK_NAMES, CheckResult, Matrix, builtin_cases, cli_check
from bcg_harness.cli import app

QUICK = ["check", "--buckets", "16,64", "--case", "two-requests"]


@pytest.fixture
def bcg() -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return run


def test_everything_passes_by_default(bcg: Callable[..., Result], tmp_path: Path) -> None:
    result = bcg("check", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    raw = json.loads((tmp_path / "out.json").read_text())
    assert raw["summary"]["green"]
    names = [case.name for case in builtin_cases([16, 64, 256])]
    checked = {(r["case"], r["check"]) for r in raw["results"] if r["backend"] == "sdpa"}
    assert {case for case, _ in checked} == set(names)
    # Of the backends that run here, none declares that it can be captured.
    assert {check for _, check in checked} == set(CHECK_NAMES) - {"full_graph"}
    assert all(name in result.output for name in names)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("json") / "out.json"
    result = CliRunner().invoke(app, [*QUICK, "--backend", "sdpa", "--json", str(path)])
    assert result.exit_code == 0, result.output
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


def test_json_holds_the_environment(written: dict[str, Any]) -> None:
    environment = written["environment"]
    assert environment["libraries"]["torch"] == torch.__version__
    assert environment["engine"] == "CPU emulator"
    assert environment["device"] == "cpu"
    assert environment["hardware"]


def test_json_holds_model_and_settings(written: dict[str, Any]) -> None:
    assert written["model"]["name"] == "tiny"
    assert written["model"]["num_layers"] == 4
    assert written["model"]["dtype"] == "float32"
    assert written["buckets"] == [16, 64]
    assert written["settings"] == {"page_size": 16, "seed": 0, "text": None, "debug": False}


def test_json_holds_what_was_captured(written: dict[str, Any]) -> None:
    buckets = written["capture"]["buckets"]
    assert [(b["bucket"], b["breaks"], b["segments"]) for b in buckets] == [(64, 4, 5), (16, 4, 5)]


def test_json_holds_the_cases_so_that_they_can_be_run_again(
    written: dict[str, Any], bcg: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "again.json"
    file.write_text(json.dumps(written["cases"]))
    result = bcg("check", "--buckets", "16,64", "--case", str(file))
    assert result.exit_code == 0, result.output
    assert "two-requests" in result.output


def test_json_holds_errors_beside_budgets(written: dict[str, Any]) -> None:
    (oracle,) = [r for r in written["results"] if r["check"] == "oracle"]
    assert 0 < oracle["error"] < oracle["budget"] < 1e-4
    assert oracle["outcome"] == "passed"


def test_the_summary_counts(bcg: Callable[..., Result]) -> None:
    result = bcg(*QUICK, "--backend", "sdpa")
    assert result.exit_code == 0
    assert "8 passed, 0 failed" in result.output


def test_the_context_is_named(bcg: Callable[..., Result]) -> None:
    output = " ".join(bcg(*QUICK, "--dtype", "bf16").output.split())
    for part in ("CPU emulator", f"torch {torch.__version__}", "tiny (4 layers", "bfloat16"):
        assert part in output


def test_a_failed_check_exits_with_1(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(sdpa="bcg_harness.testing:IgnoresLengths")
    result = bcg(*QUICK)
    assert result.exit_code == 1
    assert "FAIL sdpa / two-requests / step 0 / oracle: request 1: error" in result.output


def test_a_missing_backend_is_a_counted_skip(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(mask="bcg_harness.testing:MaskBackend", gone="bcg_harness.testing:NotInstalled")
    result = bcg(*QUICK)
    assert result.exit_code == 0, result.output
    assert "1 skipped" in result.output
    assert "skip gone: no such library: pip install gone" in result.output


def test_a_missing_backend_that_was_asked_for_exits_with_1(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(mask="bcg_harness.testing:MaskBackend", gone="bcg_harness.testing:NotInstalled")
    result = bcg(*QUICK, "--backend", "mask", "--backend", "gone")
    assert result.exit_code == 1
    assert "ERROR gone: no such library: pip install gone" in result.output
    assert "9 passed" in result.output


def test_an_all_skipped_run_is_not_green(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(gone="bcg_harness.testing:NotInstalled")
    result = bcg(*QUICK)
    assert result.exit_code == 1
    assert "not green" in result.output


def test_no_backend_at_all_is_not_green(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends()
    assert bcg(*QUICK).exit_code == 1


def test_a_declared_limit_is_a_skip_that_names_it(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(mask="bcg_harness.testing:MaskBackend", few="bcg_harness.testing:NoPrefix")
    result = bcg("check", "--buckets", "16,64", "--case", "one-token", "--case", "two-chunks")
    assert result.exit_code == 0, result.output
    assert "skip few: cached_prefix" in result.output


def test_a_dtype_that_is_not_served_is_a_skip_that_names_it(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(mask="bcg_harness.testing:MaskBackend", few="bcg_harness.testing:NoFloat32")
    result = bcg(*QUICK)
    assert result.exit_code == 0, result.output
    assert "dtypes: takes bfloat16, not float32 (try --dtype bfloat16)" in result.output


def test_a_broken_entry_point_exits_with_1_and_hides_nobody(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(mask="bcg_harness.testing:MaskBackend", broken="no_such_module:Backend")
    result = bcg(*QUICK)
    assert result.exit_code == 1
    assert "no_such_module" in result.output
    assert "9 passed" in result.output


def test_every_variant_is_checked_under_its_own_name(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(many="bcg_harness.testing:Variants")
    result = bcg(*QUICK)
    assert result.exit_code == 0, result.output
    assert "18 passed, 0 failed, 1 skipped" in result.output
    for part in ("backend many[version=1]", "backend many[version=2]", "skip many[version=3]"):
        assert part in result.output


def test_a_context_beyond_the_model_is_a_skip_that_names_it(
    bcg: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"name": "long", "steps": [{"requests": [[0, 5000]]}]}))
    result = bcg(*QUICK, "--case", str(file))
    assert result.exit_code == 0, result.output
    assert "max_positions: the case needs 5000 positions, the model has 2048" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--backend", "mosk"], "known backends", id="backend"),
        pytest.param(["--case", "three-requests"], "known cases", id="case"),
        pytest.param(["--case", "nowhere.json"], "nowhere.json", id="case-file"),
        pytest.param(["--model", "no/such/dir"], "built-in models are tiny", id="model"),
        pytest.param(["--dtype", "int8"], "possible are float32", id="dtype"),
        pytest.param(["--device", "tpu"], "possible are cpu and cuda", id="device"),
        pytest.param(["--buckets", "64,16"], "ascending", id="buckets-descending"),
        pytest.param(["--buckets", "16,many"], "whole numbers", id="buckets-words"),
        pytest.param(["--buckets", "99999999999"], "at most 1048576", id="buckets-huge"),
        pytest.param(["--json", "/no/such/place/out.json"], "cannot write", id="json"),
        pytest.param(["--json", "/"], "cannot write", id="json-directory"),
        pytest.param(["--text", __file__], "has no tokenizer", id="text-without-tokenizer"),
        pytest.param(["--text", "nowhere.md"], "nowhere.md", id="text"),
        pytest.param(["--seed", "-1"], "seed", id="seed"),
        pytest.param(["--seed", str(2**63)], "seed", id="seed-huge"),
        pytest.param(["--no-such-option"], "No such option", id="option"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_possible(
    bcg: Callable[..., Result], arguments: list[str], message: str
) -> None:
    result = bcg("check", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_exits_with_2(bcg: Callable[..., Result]) -> None:
    result = bcg("check", "--device", "cuda")
    assert result.exit_code == 2
    assert "--device cpu" in result.stderr


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that has Ctrl-C pressed after so many cases."""

    def arrange(cases: int) -> None:
        check_case, calls = Matrix.check_case, count()

        def interrupted(*args: Any) -> list[CheckResult]:
            if next(calls) == cases:
                raise KeyboardInterrupt
            return check_case(*args)

        monkeypatch.setattr(Matrix, "check_case", interrupted)

    return arrange


THREE = ["check", "--buckets", "16,64", "--backend", "sdpa"]
THREE += ["--case", "one-token", "--case", "two-requests", "--case", "two-chunks"]


def test_an_interrupted_run_shows_and_writes_what_it_has(
    bcg: Callable[..., Result], interrupt_after: Callable[[int], None], tmp_path: Path
) -> None:
    interrupt_after(2)
    result = bcg(*THREE, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 130
    assert "interrupted after 2 of 3 cases" in result.output
    raw = json.loads((tmp_path / "out.json").read_text())
    assert {r["case"] for r in raw["results"]} == {"one-token", "two-requests"}
    assert raw["summary"]["interrupted"] is True
    assert raw["summary"]["green"] is False


def test_a_run_interrupted_before_its_first_case_writes_nothing(
    bcg: Callable[..., Result], interrupt_after: Callable[[int], None], tmp_path: Path
) -> None:
    interrupt_after(0)
    result = bcg(*THREE, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 130
    assert "interrupted before the first case" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_probe_of_the_json_file_leaves_it_as_it_was(
    bcg: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "out.json").write_text("{}")
    assert bcg(*QUICK, "--json", str(tmp_path / "out.json"), "--model", "no/dir").exit_code == 2
    assert (tmp_path / "out.json").read_text() == "{}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, as Linux has")
def test_a_full_device_is_refused_early(bcg: Callable[..., Result]) -> None:
    result = bcg(*QUICK, "--json", "/dev/full")
    assert result.exit_code == 2
    assert "cannot write /dev/full: No space left on device" in result.stderr


def test_json_carries_the_traceback_of_an_error(
    bcg: Callable[..., Result], only_backends: Callable[..., None], tmp_path: Path
) -> None:
    only_backends(bad="bcg_harness.testing:Raises")
    result = bcg(*QUICK, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 1
    assert "1 error in" in result.output
    (error,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert "Traceback" in error["traceback"]
    assert "Traceback" not in result.output


def test_errors_are_counted_in_the_plural(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(a="no_such_module:Backend", b="no_such_module:Backend")
    assert "2 errors in" in bcg(*QUICK).output


def test_what_does_not_fit_in_memory_exits_with_2(
    bcg: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cli_check, "Matrix", make)
    result = bcg(*QUICK)
    assert result.exit_code == 2
    assert "does not fit in memory: choose smaller --buckets" in result.stderr


@pytest.fixture
def odd_names(monkeypatch: pytest.MonkeyPatch) -> None:
    values = dict.fromkeys(["odd name/[x]", "other"], "bcg_harness.testing:MaskBackend")
    points = {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    monkeypatch.setattr(registry, "_installed", lambda: points)


@pytest.mark.usefixtures("odd_names")
def test_a_backend_of_an_odd_name_is_an_error_and_the_others_are_checked(
    bcg: Callable[..., Result],
) -> None:
    result = bcg(*QUICK)
    assert result.exit_code == 1, result.output
    assert "needs another name" in result.output
    assert "other" in result.output


@pytest.mark.usefixtures("odd_names")
def test_a_class_of_another_name_than_it_is_registered_under_is_noted_once(
    bcg: Callable[..., Result],
) -> None:
    result = bcg(*QUICK, "--backend", "other")
    assert result.exit_code == 0, result.output
    assert result.output.count("registered as 'other', but its class has name = 'mask'") == 1
