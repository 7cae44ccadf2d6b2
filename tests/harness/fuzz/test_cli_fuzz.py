"""``bcg fuzz``: what it prints, what it writes, how it exits, and that ``bcg check`` replays what it wrote."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, registry
from bcg_harness import CHECK_NAMES, read_cases
from bcg_harness.checks import MECHANISM
from bcg_harness.cli import app
from bcg_harness.fuzz.fuzz import Fuzz

QUICK = ["--cases", "5", "--checks", "mechanism", "--buckets", "3,8"]


@pytest.fixture
def bcg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return run


def test_a_right_backend_exits_with_0(bcg: Callable[..., Result], tmp_path: Path) -> None:
    result = bcg("fuzz", *QUICK, "--backend", "sdpa")
    assert result.exit_code == 0, result.output
    assert "sdpa: 5 cases passed" in result.output
    assert "5 of 5 cases finished" in result.output
    assert list(tmp_path.iterdir()) == []


def test_one_case_is_counted_as_one(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(gone="bcg_harness.testing:NotInstalled", mask="bcg_harness.testing:MaskBackend")
    result = bcg("fuzz", *QUICK, "--cases", "1")
    assert "skip gone: " in result.output
    assert "mask: 1 case passed" in result.output


def test_json_holds_the_result_and_its_context(bcg: Callable[..., Result], tmp_path: Path) -> None:
    bcg("fuzz", *QUICK, "--backend", "sdpa", "--seed", "3", "--json", "out.json")
    raw = json.loads((tmp_path / "out.json").read_text())
    summary = raw["summary"]
    assert (summary["green"], summary["cases_finished"]) == (True, 5)
    assert summary["cases_per_second"] > 0
    assert raw["passed"] == {"sdpa": 5}
    assert raw["environment"]["engine"] == "CPU emulator"
    assert raw["model"]["name"] == "tiny"
    assert (raw["settings"]["seed"], raw["settings"]["checks"]) == (3, list(MECHANISM))


FAULTY = {"faulty": "bcg_harness.testing:WritesRowR"}


@dataclass(frozen=True, kw_only=True)
class Failed:
    """What a run with a faulty backend printed, and the folder that it wrote to."""

    result: Result
    folder: Path

    @property
    def case(self) -> str:
        """Return the name of the case that failed."""
        (path,) = self.folder.glob("fuzz-*.json")
        return path.stem.removesuffix("-faulty")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        points = {
            name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in FAULTY.items()
        }
        patch.setattr(registry, "_installed", lambda: points)
        arguments = ["fuzz", *QUICK, "--page-size", "3", "--seed", "1", "--json", "out.json"]
        return Failed(result=CliRunner().invoke(app, arguments), folder=folder)


def test_a_failure_exits_with_1_and_names_check_and_command(failed: Failed) -> None:
    output = failed.result.output
    assert failed.result.exit_code == 1
    assert f"FAIL {failed.case} with faulty: padding: attention output of padded rows" in output
    assert f"replay: bcg check --case {failed.case}-faulty.json --backend faulty" in output
    assert "--buckets 3,8 --page-size 3 --model tiny" in output


def test_the_command_that_is_shown_replays_the_case(
    failed: Failed,
    bcg: Callable[..., Result],
    only_backends: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_backends(**FAULTY)
    monkeypatch.chdir(failed.folder)
    (line,) = (line for line in failed.result.output.splitlines() if "replay: " in line)
    result = bcg(*line.partition("replay: bcg ")[2].split())
    assert result.exit_code == 1
    assert f"FAIL faulty / {failed.case} / step 0 / padding" in result.output


def test_the_file_is_a_case_that_says_how_to_replay_it(failed: Failed) -> None:
    (path,) = failed.folder.glob("fuzz-*.json")
    (case,) = read_cases(path.read_text())
    assert case.description.startswith(f"bcg check --case {path.name} --backend faulty")
    assert [step.num_tokens for step in case.steps] == [1]


def test_json_holds_the_case_as_drawn_and_as_shrunk(failed: Failed) -> None:
    raw = json.loads((failed.folder / "out.json").read_text())
    (found,) = raw["counterexamples"]
    assert (found["backend"], found["checks"]) == ("faulty", ["padding"])
    assert (found["buckets"], found["page_size"]) == ([3, 8], 3)
    assert found["reproduced"]
    assert len(str(found["case"])) < len(str(found["drawn"]))
    assert not raw["summary"]["green"]


def test_nothing_to_check_is_no_success(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(gone="bcg_harness.testing:NotInstalled")
    result = bcg("fuzz", *QUICK)
    assert result.exit_code == 1
    assert "skip gone" in result.output
    assert "nothing was checked with success" in result.output


def test_a_broken_entry_point_exits_with_1_and_hides_nobody(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(broken="no_such_module:Backend", mask="bcg_harness.testing:MaskBackend")
    result = bcg("fuzz", *QUICK)
    assert result.exit_code == 1
    assert "ERROR broken" in result.output
    assert "mask: 5 cases passed" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checks", "speed"], f"possible are all, mechanism ({', '.join(MECHANISM)})"),
        (["--checks", "bit_equal,"], CHECK_NAMES[-1]),
        (["--backend", "mosk"], "known backends"),
        (["--buckets", "9,3"], "ascending order"),
        (["--device", "tpu"], "possible are cpu and cuda"),
        (["--dtype", "int8"], "possible are float32"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--output", "/dev/null/below"], "cannot make the folder"),
        (["--json", "nowhere/out.json"], "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_exits_with_2_and_says_what_is_possible(
    bcg: Callable[..., Result], arguments: list[str], message: str
) -> None:
    result = bcg("fuzz", "--cases", "1", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_folder_for_failing_cases_is_made(bcg: Callable[..., Result], tmp_path: Path) -> None:
    result = bcg("fuzz", *QUICK, "--backend", "sdpa", "--output", "below/here")
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "below" / "here").iterdir()) == []


def test_an_interrupted_run_says_so_and_keeps_what_it_has(
    bcg: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Fuzz._judge

    def interrupted(self: Fuzz, *arguments: object) -> None:
        if self.tally.finished == 2:
            raise KeyboardInterrupt
        judge(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Fuzz, "_judge", interrupted)
    result = bcg("fuzz", *QUICK, "--backend", "sdpa", "--json", "out.json")
    assert result.exit_code == 130
    assert "2 of 5 cases finished" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["summary"]["interrupted"]


def test_help_shows_the_long_run() -> None:
    output = CliRunner().invoke(app, ["fuzz", "--help"]).output
    assert "bcg fuzz --cases 10000 --checks mechanism" in output
