"""``--buckets`` takes the file of a ladder in place of numbers."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcg_core import BucketError, TokenBuckets
from bcg_harness import HarnessError
from bcg_harness.cli import app
from bcg_harness.selection import parse_buckets


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    path = tmp_path / "ladder.json"
    TokenBuckets([8, 32]).save(path)
    return path


def test_a_ladder_is_read_from_a_file(ladder: Path) -> None:
    assert list(parse_buckets(str(ladder))) == [8, 32]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(BucketError, match=r"cannot read nowhere\.json"):
        parse_buckets("nowhere.json")


def test_buckets_in_a_file_can_be_too_large_too(tmp_path: Path) -> None:
    (tmp_path / "ladder.json").write_text('{"buckets": [16, 1048577]}')
    with pytest.raises(HarnessError, match="bucket 1048577 is too large: at most 1048576"):
        parse_buckets(str(tmp_path / "ladder.json"))


def test_check_captures_the_ladder_of_a_file(ladder: Path, tmp_path: Path) -> None:
    arguments = ["check", "--backend", "sdpa", "--case", "one-token", "--buckets", str(ladder)]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    captured = json.loads((tmp_path / "out.json").read_text())["capture"]["buckets"]
    assert [bucket["bucket"] for bucket in captured] == [32, 8]


def test_cases_are_made_for_the_ladder_of_a_file(ladder: Path) -> None:
    from_file = CliRunner().invoke(app, ["cases", "--json", "--buckets", str(ladder)])
    from_numbers = CliRunner().invoke(app, ["cases", "--json", "--buckets", "8,32"])
    assert from_file.output == from_numbers.output


@pytest.mark.parametrize("command", ["bench", "cases", "check"])
def test_help_says_that_a_file_will_do(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert "N,N,...|FILE.json" in result.output
