"""The pytest-benchmark suite, run as a user runs it: from a folder that knows nothing of this repository."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

OPTIONS = ["--bcg-backend", "sdpa", "--bcg-mode", "padded_eager", "--bcg-mode", "full"]


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def pytest_in(folder: Path, *arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--pyargs", "bcg_harness.bench", *arguments]
    environment = {**os.environ, "PY_COLORS": "0"}
    environment.pop(without, None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    folder = tmp_path_factory.mktemp("empty")
    workloads = ["--bcg-workload", "single-40", "--bcg-workload", "chunked-60x30"]
    done = pytest_in(folder, *OPTIONS, *workloads, "--benchmark-json", "out.json", "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the JSON of breakable with a backend that nobody registered."""
    folder = tmp_path_factory.mktemp("own")
    source = "from bcg_backends.sdpa import SDPABackend\n\nclass Mine(SDPABackend):\n    pass\n"
    (folder / "my_kernel.py").write_text(source)
    arguments = ["--bcg-backend-class", "my_kernel:Mine", "--bcg-mode", "breakable"]
    done = pytest_in(
        folder, *arguments, "--bcg-workload", "single-40", "--benchmark-json", "out.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


def test_groups_are_backends_and_workloads_and_rows_are_modes(done: tuple[str, Any]) -> None:
    rows = {(bench["group"], bench["params"]["bench_mode"]) for bench in done[1]["benchmarks"]}
    groups = "sdpa single-40", "sdpa chunked-60x30"
    assert rows == {(group, mode) for group in groups for mode in ("eager", "padded_eager")}


def test_a_mode_that_is_not_possible_skips_with_its_reason(done: tuple[str, Any]) -> None:
    assert "4 passed, 2 skipped" in done[0]
    assert "supports_full_graph" in done[0]


def test_every_row_carries_its_check_and_its_measures(done: tuple[str, Any]) -> None:
    for bench in done[1]["benchmarks"]:
        extra = bench["extra_info"]
        assert extra["status"] == "measured"
        assert extra["check"]["error"] <= extra["check"]["budget"]
        assert extra["ttft"]["median"] > extra["latency"]["median"] > 0
        assert {"speedup", "device"} & set(extra) == set()


def test_every_row_carries_what_its_mode_took(done: tuple[str, Any]) -> None:
    setups = [(b["extra_info"]["setup"], b["params"]["bench_mode"]) for b in done[1]["benchmarks"]]
    assert {(setup["backend"], setup["mode"]) for setup, _ in setups} == {
        ("sdpa", "eager"),
        ("sdpa", "padded_eager"),
    }
    assert [mode for setup, mode in setups if setup["mode"] != mode] == []


def test_a_mode_that_captures_says_how_long_that_took(captured: Any) -> None:
    (bench,) = [b for b in captured["benchmarks"] if b["params"]["bench_mode"] == "breakable"]
    setup = bench["extra_info"]["setup"]
    assert setup["capture_seconds"] > 0
    assert [bucket["bucket"] for bucket in setup["buckets"]] == [256, 64, 16]


def test_parameters_are_plain_names(captured: Any) -> None:
    assert captured["benchmarks"][0]["params"] == {
        "bcg_backend": "my_kernel:Mine",
        "bench_mode": "eager",
        "bench_workload": "single-40",
    }


def test_one_prefill_is_one_iteration(done: tuple[str, Any]) -> None:
    assert {bench["stats"]["iterations"] for bench in done[1]["benchmarks"]} == {1}


def test_the_machine_is_described_with_its_libraries(done: tuple[str, Any]) -> None:
    machine = done[1]["machine_info"]["bcg"]
    assert machine["engine"] == "CPU emulator"
    assert "torch" in machine["libraries"]


def test_the_summary_says_that_it_is_the_emulator(done: tuple[str, Any]) -> None:
    assert "CPU emulator" in done[0]
    assert "say nothing of a GPU" in done[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bcg-workload", "single"], "no workload 'single'"),
        (["--bcg-mode", "faster"], "no mode 'faster'"),
        (["--bcg-device", "quantum"], "unknown device 'quantum'"),
        (["--bcg-workload", "single-5000"], "has a request of 5000 tokens"),
        (["--bcg-model", "nix"], "nix: no such directory"),
        (["-p", "no:benchmark"], "and no -p no:benchmark"),
        pytest.param(["--bcg-require-cuda"], "or use --bcg-device cpu", marks=WITHOUT_GPU),
    ],
    ids=["workload", "mode", "device", "context", "model", "no-pytest-benchmark", "require-cuda"],
)
def test_wrong_use_is_told_once_and_without_a_trace(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = pytest_in(tmp_path, "-rN", "--bcg-backend", "sdpa", *arguments)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert output.count(words) == 1
    assert "exception" not in output


def test_threads_are_kept_from_spinning_before_torch_is_imported(tmp_path: Path) -> None:
    probe = """
import os, sys, pytest

@pytest.hookimpl(trylast=True)
def pytest_configure():
    print("policy:", os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
"""
    (tmp_path / "probe.py").write_text(probe)
    done = pytest_in(tmp_path, "-p", "probe", "--collect-only", without="OMP_WAIT_POLICY")
    assert "policy: PASSIVE False" in done.stdout
