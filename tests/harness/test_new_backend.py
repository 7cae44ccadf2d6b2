"""A new plug-in works as it is written: it builds, registers, and passes the checks."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from bcg_harness.cli import app
from bcg_harness.errors import HarnessError
from bcg_harness.scaffold.names import PluginNames
from bcg_harness.scaffold.project import write_project

BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / "my-kernel.v2"
    write_project(PluginNames.of("my-kernel.v2"), folder)
    return folder


@pytest.fixture(scope="module")
def installed(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the plug-in's wheel and unpack it into a folder, which needs neither pip nor this environment."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install hatchling")
    target = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=project, check=True)
    (wheel,) = target.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_with(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "PY_COLORS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_its_own_pytest_runs_its_tests_and_the_kit(installed: Path, project: Path) -> None:
    cases = ["--bcg-case", "two-requests", "--bcg-case", "cached-prefixes"]
    done = run_with(installed, project, "pytest", "--bcg-buckets", "16,64", *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bcg backends to check: my-kernel.v2\n" in done.stdout
    assert "18 passed" in done.stdout
    assert "16 checks run on CPU" in done.stdout


def test_bcg_check_passes(installed: Path, tmp_path: Path) -> None:
    arguments = [
        "check",
        "--backend",
        "my-kernel.v2",
        "--case",
        "five-chunks",
        "--buckets",
        "16,64",
    ]
    code = f"from bcg_harness.cli import app; app({arguments})"
    (tmp_path / "run_bcg.py").write_text(code)
    done = run_with(installed, tmp_path, "run_bcg")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "41 passed, 0 failed" in done.stdout


def test_the_class_is_named_after_the_plug_in(project: Path) -> None:
    source = (project / "src/my_kernel_v2/attention.py").read_text()
    assert "class MyKernelV2Backend(AttentionBackend)" in source
    assert 'name = "my-kernel.v2"' in source


def test_no_placeholder_is_left(project: Path) -> None:
    # Other tests import from the project, which leaves compiled modules in it.
    files = [path for path in project.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    texts = {path: path.read_text() for path in files}
    assert len(texts) >= 5
    assert [path for path, text in texts.items() if "$" in text] == []


def test_the_command_says_what_to_do_next(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "kernel"
    result = CliRunner().invoke(app, ["new-backend", "mine", "--directory", str(folder)])
    assert result.exit_code == 0, result.output
    assert (folder / "pyproject.toml").is_file()
    for words in ("src/mine/attention.py", "pip install -e", "bcg check --backend mine"):
        assert words in result.output


def test_the_default_folder_has_the_name_of_the_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["new-backend", "my-kernel"])
    assert (tmp_path / "my-kernel" / "src" / "my_kernel" / "attention.py").is_file()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    result = CliRunner().invoke(app, ["new-backend", "mine", "--directory", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["new-backend", "mine", "--directory", f"{tmp_path}/file/x"])
    assert result.exit_code == 2
    assert "cannot write" in result.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2fast", "begin with a letter"),
        ("a b", "begin with a letter"),
        ("fast-", "end with a letter or a digit"),
        ("../up", "begin with a letter"),
        ("", "begin with a letter"),
        ("für", "use these"),
        ("lambda", "a word of Python"),
        ("sdpa", "registered already"),
        ("json", "can be imported already"),
        ("bcg-core", "can be imported already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(name: str, words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        PluginNames.of(name)


@pytest.mark.parametrize(
    ("name", "module", "class_name"),
    [
        ("fast", "fast", "FastBackend"),
        ("My_Fast--kernel", "my_fast_kernel", "MyFastKernelBackend"),
        ("k9", "k9", "K9Backend"),
    ],
    ids=["plain", "mixed", "digit"],
)
def test_names_are_derived_from_one(name: str, module: str, class_name: str) -> None:
    expected = PluginNames(name=name, module=module, class_name=class_name)
    assert PluginNames.of(name) == expected
