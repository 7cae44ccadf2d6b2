"""The kit as a user runs it: another process, an empty folder, a plug-in that another distribution registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_kit_runs_from_an_empty_folder(toys: Path, tmp_path: Path) -> None:
    kit = ["-m", "pytest", "--pyargs", "bcg_harness.conformance", "--bcg-backend", "right"]
    process = subprocess.run(
        [sys.executable, *kit, "--bcg-case", "one-token", "-W", "error"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(toys), "PY_COLORS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "(toy-backends 3.1.4)" in process.stdout
    assert "9 passed" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [(["bcg_harness.conformance"], "PASSIVE"), (["json.tool"], "None")],
    ids=["kit", "other"],
)
def test_threads_are_kept_from_spinning_in_the_kit_alone(
    tmp_path: Path, arguments: list[str], policy: str
) -> None:
    (tmp_path / "conftest.py").write_text(
        "import os\n"
        "def pytest_report_header(config): return f\"policy {os.environ.get('OMP_WAIT_POLICY')}\"\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "--pyargs", *arguments, "-k", "no_test_at_all"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"policy {policy}\n" in process.stdout
