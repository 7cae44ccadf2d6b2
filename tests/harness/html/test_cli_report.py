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
