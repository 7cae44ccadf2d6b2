"""The wheel holds the four packages and nothing else, and names what others find by entry point."""

import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

SOURCE_TREE = Path(__file__).parents[2]
FOLDERS = {
    "bcg_core": SOURCE_TREE,
    "bcg_backends": SOURCE_TREE / "backends",
    "bcg_llama": SOURCE_TREE / "llama",
    "bcg_harness": SOURCE_TREE / "harness",
}
BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (SOURCE_TREE / "pyproject.toml").is_file():
        pytest.skip("needs the source tree: there is no pyproject.toml two folders up")
    pytest.importorskip("hatchling", reason="needs hatchling: pip install hatchling")
    target = tmp_path_factory.mktemp("wheel")
    build = subprocess.run(
        [sys.executable, "-c", BUILD, str(target)],
        cwd=SOURCE_TREE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture
def names(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture
def distribution(wheel: Path) -> PathDistribution:
    (dist_info,) = (path for path in ZipPath(wheel).iterdir() if path.name.endswith(".dist-info"))
    return PathDistribution(dist_info)


def test_top_level_is_the_four_packages_and_the_metadata(names: list[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(FOLDERS)
    assert len(top) == len(FOLDERS) + 1


@pytest.mark.parametrize("package", FOLDERS)
def test_package_is_typed(names: list[str], package: str) -> None:
    assert f"{package}/py.typed" in names


@pytest.mark.parametrize("package", FOLDERS)
def test_package_has_every_module_of_the_source_tree(names: list[str], package: str) -> None:
    folder = FOLDERS[package]
    sources = {path.relative_to(folder).as_posix() for path in (folder / package).rglob("*.py")}
    assert sources
    assert sources == {n for n in names if n.startswith(f"{package}/") and n.endswith(".py")}


def test_license_is_included(names: list[str]) -> None:
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


def test_the_sdpa_backend_is_registered_by_entry_point(distribution: PathDistribution) -> None:
    entry_points = distribution.entry_points.select(group="bcg.attention_backends")
    assert "sdpa" in entry_points.names


def test_the_console_script_is_called_bcg(distribution: PathDistribution) -> None:
    assert distribution.entry_points.select(group="console_scripts").names == {"bcg"}


def test_the_pytest_plugin_is_called_bcg(distribution: PathDistribution) -> None:
    assert distribution.entry_points.select(group="pytest11").names == {"bcg"}
