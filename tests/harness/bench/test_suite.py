"""The pytest-benchmark suite, run as a user runs it: from a folder that knows nothing of this repository."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OPTIONS = ["--bcg-backend", "sdpa", "--bcg-mode", "padded_eager", "--bcg-mode", "full"]


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--pyargs", "bcg_harness.bench", *arguments]
    environment = {**os.environ, "PY_COLORS": "0"}
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
        (["--bcg-device", "quantum"], "quantum"),
        (["-p", "no:benchmark"], "pip install 'breakable-cuda-graph[test]'"),
    ],
    ids=["workload", "mode", "device", "no-pytest-benchmark"],
)
def test_wrong_use_is_told(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = pytest_in(tmp_path, "--bcg-backend", "sdpa", *arguments)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
