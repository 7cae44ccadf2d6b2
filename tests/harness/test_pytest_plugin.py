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
    for option in ("--bcg-backend", "--bcg-device", "--bcg-dtype", "--bcg-model", "--bcg-debug"):
        assert option in output


def test_a_class_that_nobody_registers_can_be_tested(run_pytest: Run, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("from bcg_harness.testing import MaskBackend as Mine")
    test = "def test_it(bcg_backend): assert bcg_backend.selected.name == 'mask'"
    process = run_pytest("-v", "--bcg-backend-class=kernel:Mine", test=test)
    assert process.returncode == 0, process.stdout
    assert "test_it[kernel:Mine]" in process.stdout
    assert "1 passed" in process.stdout


def test_the_seed_reaches_the_model(run_pytest: Run) -> None:
    test = (
        "import torch\nfrom bcg_llama import PRESETS, random_llama\n"
        "def test_it(bcg_model):\n"
        "    expected = dict(random_llama(PRESETS['tiny'], seed=7).named_tensors())\n"
        "    assert all(torch.equal(expected[n], t) for n, t in bcg_model.named_tensors())\n"
    )
    assert run_pytest("--bcg-seed=7", test=test).returncode == 0
    assert run_pytest("--bcg-seed=8", test=test).returncode == 1


FOREIGN_CONFTEST = """
import pytest
def pytest_addoption(parser):
    for name in ("--backend", "--device", "--case", "--model", "--report", "--seed"):
        parser.addoption(name, default="theirs")
@pytest.fixture
def backend(request):
    return request.config.getoption("--backend")
@pytest.fixture
def verdict():
    return "theirs"
"""
FOREIGN_TEST = """
import pytest, sys
@pytest.mark.parametrize("case", [1, 2])
def test_it(backend, verdict, case):
    assert (backend, verdict) == ("numpy", "theirs")
    assert not {"torch", "bcg_core", "numpy"} & set(sys.modules)
"""


def test_a_project_with_a_backend_of_its_own_is_left_alone(run_pytest: Run, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FOREIGN_CONFTEST)
    process = run_pytest("--backend=numpy", "-W", "error", "--strict-markers", test=FOREIGN_TEST)
    assert process.returncode == 0, process.stdout
    assert "2 passed" in process.stdout
    assert "bcg" not in process.stdout.partition("collected")[2]


def test_importing_the_plugin_takes_less_than_50_milliseconds() -> None:
    code = (
        "import pytest, time; start = time.perf_counter(); import bcg_harness.pytest_plugin; "
        "print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(5)]
    assert min(float(run.stdout) for run in runs) < 0.05


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, bcg_harness.pytest_plugin; print(*{n.split('.')[0] for n in sys.modules})"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "numpy", "rich", "typer", "bcg_core", "bcg_llama"} & set(loaded) == set()
