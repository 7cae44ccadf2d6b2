"""What the README shows must work as shown."""

import re
import tomllib
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)


def test_python_example_runs_and_replays_both_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks("python")
    exec(compile(example, README.name, "exec"), {})
    printed = capsys.readouterr().out
    assert "bucket=256, reason=None" in printed
    assert "bucket=16, reason=None" in printed
    assert "fallbacks=Counter()" in printed


def test_entry_point_example_names_the_group_of_the_registry() -> None:
    from bcg_core import ENTRY_POINT_GROUP

    (example,) = blocks("toml")
    assert list(tomllib.loads(example)["project"]["entry-points"]) == [ENTRY_POINT_GROUP]


def test_ci_runs_the_test_command() -> None:
    command = next(line for line in "".join(blocks("sh")).splitlines() if line.endswith("tox"))
    script = README.with_name(".ci") / "run"
    assert command in script.read_text("utf-8")
