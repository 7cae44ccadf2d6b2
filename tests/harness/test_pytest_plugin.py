"""The plugin serves a stranger's tests, in a project of its own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TEST = """
def test_it(bcg_backend, bcg_model, bcg_device, bcg_dtype):
    assert bcg_backend.label == "sdpa"
    assert bcg_backend.selected.unavailable() is None
    assert bcg_model.spec.dtype == bcg_dtype
    assert bcg_model.spec.device == bcg_device
    print("layers", bcg_model.spec.num_layers, bcg_dtype)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_pytest(tmp_path: Path) -> Run:
    def run(*arguments: str, test: str = TEST) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_it.py").write_text(test)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-rs", "-s", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_fixtures_follow_the_options(run_pytest: Run) -> None:
    options = ["--bcg-backend=sdpa", "--bcg-dtype=bf16", "--bcg-model=tiny-mha"]
    process = run_pytest("-v", *options)
    assert process.returncode == 0, process.stdout
    assert "test_it[sdpa]" in process.stdout
    assert "layers 4 torch.bfloat16" in process.stdout


def test_a_backend_that_cannot_be_used_is_skipped_once(run_pytest: Run) -> None:
    parametrized = "import pytest\n@pytest.mark.parametrize('size', [1, 2, 3])" + TEST
    test = parametrized.replace("(bcg_backend", "(size, bcg_backend")
    names = ["--bcg-backend=sdpa", "--bcg-backend=torch_varlen"]
    process = run_pytest(*names, test=test)
    assert process.returncode == 0, process.stdout
    assert "3 passed, 1 skipped, 2 deselected" in process.stdout
    assert "torch_varlen: devices: runs on cuda, not on cpu" in process.stdout


def test_an_unknown_backend_is_an_error_that_lists_the_known_ones(run_pytest: Run) -> None:
    process = run_pytest("--bcg-backend=mosk")
    assert process.returncode == 2
    assert "known backends" in process.stdout


def test_a_bad_option_says_what_is_possible(run_pytest: Run) -> None:
    process = run_pytest("--bcg-backend=sdpa", "--bcg-dtype=int8")
    assert process.returncode == 1
    assert "possible are float32" in process.stdout


def test_options_are_in_the_help_under_their_own_heading(run_pytest: Run) -> None:
    output = run_pytest("--help").stdout
    assert "breakable CUDA graphs:" in output
    for option in ("--bcg-backend", "--bcg-device", "--bcg-dtype", "--bcg-model"):
        assert option in output
