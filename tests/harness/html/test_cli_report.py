"""``bcg report``: what it writes, what it prints, and how it exits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bcg_harness.bench.record import BenchReport
from bcg_harness.cli import app
from bcg_harness.html import extra

Save = Callable[..., Path]


@pytest.fixture
def bcg() -> Callable[..., Result]:
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["report", *map(str, arguments)])

    return run


@pytest.fixture
def quick(brief: BenchReport, save: Save) -> Path:
    """Return the file of a run that is drawn quickly."""
    return save(brief)


def test_page_and_pictures_go_beside_the_first_file(
    bcg: Callable[..., Result], quick: Path
) -> None:
    result = bcg(quick)
    assert result.exit_code == 0, result.output
    assert quick.with_suffix(".html").read_text(encoding="utf-8").startswith("<!doctype html>")
    pictures = {path.name for path in (quick.parent / "out-charts").iterdir()}
    assert {"latency.png", "latency-dark.png", "speedup.png", "buckets.png"} <= pictures


def test_page_and_pictures_go_where_they_are_wanted(
    bcg: Callable[..., Result], quick: Path, tmp_path: Path
) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "a" / "b"
    result = bcg(quick, "--output", page, "--png", folder)
    assert result.exit_code == 0, result.output
    assert page.is_file()
    assert list(folder.glob("*.png"))


def test_pictures_can_be_left_out(bcg: Callable[..., Result], quick: Path) -> None:
    result = bcg(quick, "--no-pictures")
    assert result.exit_code == 0, result.output
    assert {path.name for path in quick.parent.iterdir()} == {"out.json", "out.html"}


def test_pictures_of_several_runs_are_numbered(
    bcg: Callable[..., Result], brief: BenchReport, save: Save
) -> None:
    bare = replace(brief, cells=(), timelines=())
    first, second = save(bare, "a.json"), save(bare, "b.json")
    assert bcg(first, second).exit_code == 0
    pictures = {path.name for path in (first.parent / "a-charts").iterdir()}
    assert {"1-setup.png", "2-setup.png"} <= pictures


def test_what_moved_between_two_runs_is_printed(
    bcg: Callable[..., Result], recorded: BenchReport, repeated: BenchReport, save: Save
) -> None:
    result = bcg(save(recorded, "a.json"), save(repeated, "b.json"), "--no-pictures")
    assert "b.json against a.json:" in result.output
    assert "times the former" in result.output


def test_two_equal_runs_have_not_moved(
    bcg: Callable[..., Result], brief: BenchReport, save: Save
) -> None:
    result = bcg(save(brief, "a.json"), save(brief, "b.json"), "--no-pictures")
    assert "b.json against a.json: no median moved by more than 5 %" in result.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("{", "is no JSON", id="no-json"),
        pytest.param("[]", "no result of `bcg bench --json`", id="other-json"),
        pytest.param(
            json.dumps({"summary": {"green": True}, "results": []}),
            "no result of `bcg bench --json`",
            id="bcg-check",
        ),
        pytest.param(
            json.dumps({"kind": "bcg bench", "schema": 1}), "damaged result", id="damaged"
        ),
        pytest.param(json.dumps({"kind": "bcg bench", "schema": 99}), "format 99", id="newer"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    bcg: Callable[..., Result], tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="utf-8")
    result = bcg(path)
    assert result.exit_code == 2
    assert "bad.json" in result.output
    assert words in result.output


@pytest.mark.parametrize(
    ("place", "value"),
    [
        pytest.param(("cells", 0, "latency", "median"), "fast", id="text-for-a-number"),
        pytest.param(("cells", 0, "latency", "median"), 0, id="no-time-at-all"),
        pytest.param(("cells", 0, "status"), "fine", id="status"),
        pytest.param(("environment",), [], id="environment"),
        pytest.param(("model",), None, id="model"),
        pytest.param(("setups", 0, "buckets", 0, "bucket"), "16", id="bucket"),
    ],
)
def test_a_value_that_was_edited_to_nonsense_is_named(
    bcg: Callable[..., Result], quick: Path, place: tuple[str | int, ...], value: object
) -> None:
    content = json.loads(quick.read_text(encoding="utf-8"))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    quick.write_text(json.dumps(content), encoding="utf-8")
    result = bcg(quick, "--no-pictures")
    assert result.exit_code == 2
    assert "out.json: damaged result of bcg bench" in result.stderr
    assert str(place[0]) in result.stderr


@pytest.mark.parametrize("key", ["environment", "model", "settings"])
def test_a_context_that_says_nothing_is_unknown(
    bcg: Callable[..., Result], quick: Path, key: str
) -> None:
    content = {**json.loads(quick.read_text(encoding="utf-8")), key: {}}
    quick.write_text(json.dumps(content), encoding="utf-8")
    assert bcg(quick, "--no-pictures").exit_code == 0


def test_a_missing_file_is_named(bcg: Callable[..., Result], tmp_path: Path) -> None:
    result = bcg(tmp_path / "none.json")
    assert result.exit_code == 2
    assert "none.json" in result.output


def test_an_output_that_cannot_be_written_is_named(
    bcg: Callable[..., Result], quick: Path, tmp_path: Path
) -> None:
    result = bcg(quick, "--output", tmp_path / "no" / "page.html")
    assert result.exit_code == 2
    assert "cannot write" in result.output


def test_a_folder_that_cannot_be_made_is_named(bcg: Callable[..., Result], quick: Path) -> None:
    result = bcg(quick, "--png", quick / "charts")
    assert result.exit_code == 2
    assert "cannot make the folder" in result.output


@pytest.mark.parametrize("place", ["old.png", "old.png/charts"])
def test_pictures_that_cannot_be_put_are_refused_before_the_page_is_written(
    bcg: Callable[..., Result], quick: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "old.png").touch()
    result = bcg(quick, "--png", tmp_path / place)
    assert result.exit_code == 2
    assert "give --png a folder" in result.output
    assert not quick.with_suffix(".html").exists()


def test_a_folder_for_no_pictures_is_refused(bcg: Callable[..., Result], quick: Path) -> None:
    result = bcg(quick, "--png", quick.parent / "charts", "--no-pictures")
    assert result.exit_code == 2
    assert "leave one of them out" in result.output
    assert not quick.with_suffix(".html").exists()


def test_the_same_file_twice_has_two_names(bcg: Callable[..., Result], quick: Path) -> None:
    result = bcg(quick, quick, "--no-pictures")
    assert f"{quick} (#2) against {quick} (#1): no median moved" in result.output


def test_files_of_one_name_are_told_apart_by_their_folders(
    bcg: Callable[..., Result], brief: BenchReport, save: Save, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = save(brief, "a/out.json"), save(brief, "b/out.json")
    result = bcg(first, second, "--no-pictures")
    assert f"{second} against {first}: no median moved" in result.output


def test_times_without_a_check_make_no_page(
    bcg: Callable[..., Result], brief: BenchReport, save: Save
) -> None:
    path = save(replace(brief, cells=(replace(brief.cells[0], check=None),)))
    result = bcg(path, "--no-pictures")
    assert result.exit_code == 2
    assert "out.json: eager, sdpa, single-16: has times, but" in result.output
    assert not path.with_suffix(".html").exists()


def test_a_result_is_not_overwritten(bcg: Callable[..., Result], quick: Path) -> None:
    before = quick.read_text()
    result = bcg(quick, "--output", quick)
    assert result.exit_code == 2
    assert quick.read_text() == before


def test_a_missing_library_is_named_with_the_command_that_helps(
    bcg: Callable[..., Result], quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: None)
    result = bcg(quick)
    assert result.exit_code == 2
    assert "jinja2 and matplotlib" in result.output
    assert "pip install 'breakable-cuda-graph[report]'" in result.output
