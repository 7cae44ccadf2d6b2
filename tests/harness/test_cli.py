"""The other commands, and what all of them share."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, registry
from bcg_harness import builtin_cases, read_cases
from bcg_harness.cli import app


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "broken": "no_such_module:Backend",
        "gone": "bcg_harness.testing:NotInstalled",
        "mask": "bcg_harness.testing:MaskBackend",
        "many": "bcg_harness.testing:Variants",
    }
    points = {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    monkeypatch.setattr(registry, "_installed", lambda: points)


@pytest.mark.usefixtures("backends")
def test_backends_lists_all_of_them_with_reasons() -> None:
    result = CliRunner().invoke(app, ["backends"])
    assert result.exit_code == 0
    for part in ("available", "pip install gone", "no_such_module", "cached_prefix"):
        assert part in " ".join(result.output.split())


@pytest.mark.usefixtures("backends")
def test_backends_as_json() -> None:
    result = CliRunner().invoke(app, ["backends", "--json"])
    records = {
        record["name"]: record for record in json.loads(result.output) if not record["options"]
    }
    assert {name: record["status"] for name, record in records.items()} == {
        "broken": "broken",
        "gone": "unavailable",
        "mask": "available",
    }
    assert records["mask"]["capabilities"]["supports_out"] is True
    assert records["mask"]["capabilities"]["dtypes"] == ["bfloat16", "float16", "float32"]


def test_backends_goes_on_behind_whatever_a_module_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stops_at_import.py").write_text("raise BaseException('no such CPU')")
    monkeypatch.syspath_prepend(tmp_path)
    values = {"mask": "bcg_harness.testing:MaskBackend", "stops": "stops_at_import:Backend"}
    points = {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    monkeypatch.setattr(registry, "_installed", lambda: points)
    records = json.loads(CliRunner().invoke(app, ["backends", "--json"]).output)
    assert [record["status"] for record in records] == ["available", "broken"]
    assert "no such CPU" in records[1]["reason"]


@pytest.mark.usefixtures("backends")
def test_backends_lists_every_variant() -> None:
    records = json.loads(CliRunner().invoke(app, ["backends", "--json"]).output)
    statuses = [(r["options"]["version"], r["status"]) for r in records if r["name"] == "many"]
    assert statuses == [(1, "available"), (2, "available"), (3, "unavailable")]


def test_backends_says_when_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", dict)
    result = CliRunner().invoke(app, ["backends"])
    assert "no attention backend is registered" in result.output


def test_the_built_in_backend_is_listed() -> None:
    records = json.loads(CliRunner().invoke(app, ["backends", "--json"]).output)
    assert "sdpa" in {record["name"] for record in records}


def test_cases_as_json_can_be_read_again() -> None:
    result = CliRunner().invoke(app, ["cases", "--json", "--buckets", "8,32"])
    assert read_cases(result.output) == builtin_cases([8, 32])


def test_cases_show_their_steps() -> None:
    result = CliRunner().invoke(app, ["cases"])
    assert "64 x 1" in result.output
    assert "80+120" in result.output
    assert "162 in 33" in result.output


def test_cases_as_json_are_sized_by_pages() -> None:
    result = CliRunner().invoke(app, ["cases", "--json", "--buckets", "8,32", "--page-size", "128"])
    assert read_cases(result.output) == builtin_cases([8, 32], page_size=128)


def test_cases_with_bad_buckets_exit_with_2() -> None:
    result = CliRunner().invoke(app, ["cases", "--buckets", "0"])
    assert result.exit_code == 2


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("command", ["check", "fuzz", "bench"])
def test_an_option_that_no_backend_takes_exits_with_2(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--backend", "mask[spilts=3]"])
    assert result.exit_code == 2
    assert "error: attention backend 'mask': options ['spilts']" in result.stderr


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.output == f"bcg {version('breakable-cuda-graph')}\n"


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(app, ["check", "--help"])
    assert "bcg check --case mine.json" in result.output


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, bcg_harness.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
