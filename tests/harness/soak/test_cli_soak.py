"""``bcg soak``: what it prints, what it writes, and how it exits."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bcg_harness import HarnessError
from bcg_harness.cli import app
from bcg_harness.soak.soak import Soak

QUICK = ["--replays", "100", "--samples", "10", "--check-every", "10", "--buckets", "3,8"]


@pytest.fixture
def bcg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["soak", *arguments])

    return run


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a run printed, and the JSON that it wrote."""

    result: Result
    written: dict[str, object]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    path = tmp_path_factory.mktemp("soak") / "out.json"
    arguments = ["soak", *QUICK, "--backend", "sdpa", "--seed", "3", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    return Finished(result=result, written=json.loads(path.read_text()))


def test_a_right_backend_exits_with_0_and_shows_what_was_watched(right: Finished) -> None:
    output = right.result.output
    assert right.result.exit_code == 0, output
    assert "tensors that Python holds" in output
    assert "nothing grows, and all that was checked is right" in output
    assert "2 of 2 buckets used" in output
    assert "more tokens than the largest bucket (8)" in output


def test_json_holds_the_context_and_all_readings(right: Finished) -> None:
    raw: dict[str, dict[str, object]] = right.written  # type: ignore[assignment]
    assert raw["kind"] == "bcg soak"
    assert raw["summary"]["green"]
    assert raw["environment"]["engine"] == "CPU emulator"
    assert (raw["model"]["name"], raw["settings"]["seed"]) == ("tiny", 3)
    assert {len(column) for column in raw["samples"].values()} == {10}  # type: ignore[arg-type]
    assert set(raw["missing"].values()) == {"no GPU is used"}


def test_json_justifies_every_tolerance(right: Finished) -> None:
    growths: list[dict[str, object]] = right.written["growth"]  # type: ignore[assignment]
    assert all(growth["why"] and growth["within"] for growth in growths)


def test_a_leak_exits_with_1_and_names_the_quantity_and_the_types(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(faulty="bcg_harness.testing:KeepsBatches")
    result = bcg(*QUICK)
    assert result.exit_code == 1
    (line,) = (line for line in result.output.splitlines() if "tensors that Python holds" in line)
    assert "GROWS" in line
    assert "torch.Tensor" in result.output


def test_a_wrong_result_exits_with_1_and_names_the_check(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(faulty="bcg_harness.testing:WritesRowR")
    result = bcg(*QUICK)
    assert result.exit_code == 1
    assert "FAIL batch" in result.output
    assert ": padding: attention output " in result.output


def test_nothing_to_serve_is_no_success(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(gone="bcg_harness.testing:NotInstalled")
    result = bcg(*QUICK)
    assert result.exit_code == 1
    assert "skip gone" in result.output
    assert "buckets used" not in result.output


def test_a_broken_entry_point_exits_with_1_and_hides_nobody(
    bcg: Callable[..., Result], only_backends: Callable[..., None]
) -> None:
    only_backends(broken="no_such_module:Backend", mask="bcg_harness.testing:MaskBackend")
    result = bcg(*QUICK)
    assert result.exit_code == 1
    assert "ERROR broken" in result.output
    assert "mask: " in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "mosk"], "known backends"),
        (["--buckets", "9,3"], "ascending order"),
        (["--device", "tpu"], "possible are cpu and cuda"),
        (["--samples", "5"], "take 10 to 200"),
        (["--json", "nowhere/out.json"], "cannot write"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_exits_with_2_and_says_what_is_possible(
    bcg: Callable[..., Result], arguments: list[str], message: str
) -> None:
    result = bcg(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_an_interrupted_run_says_so_and_keeps_what_it_has(
    bcg: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Soak._pause

    def interrupted(self: Soak, number: int) -> None:
        if number == 8:
            raise KeyboardInterrupt
        pause(self, number)

    monkeypatch.setattr(Soak, "_pause", interrupted)
    result = bcg(*QUICK, "--backend", "sdpa", "--json", "out.json")
    assert result.exit_code == 130
    assert "interrupted" in result.output
    raw = json.loads((tmp_path / "out.json").read_text())
    assert raw["summary"]["interrupted"]
    assert len(raw["samples"]["replays"]) == 8
    assert raw["growth"]


def test_a_run_whose_json_cannot_be_written_is_printed_all_the_same(
    bcg: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(raw: object, path: Path) -> None:
        raise HarnessError(f"cannot write {path}: no space left")

    monkeypatch.setattr("bcg_harness.cli_soak.write_json", full)
    result = bcg(*QUICK, "--backend", "sdpa", "--json", "out.json")
    assert result.exit_code == 2
    assert "nothing grows, and all that was checked is right" in result.output


def test_numbers_that_do_not_fit_are_refused_before_a_model_is_loaded(
    bcg: Callable[..., Result],
) -> None:
    result = bcg("--replays", "20", "--samples", "30", "--model", "no/such/model")
    assert result.exit_code == 2
    assert "at most one a replay" in result.output


def test_help_shows_the_run_on_a_gpu() -> None:
    output = CliRunner().invoke(app, ["soak", "--help"]).output
    assert "bcg soak --device cuda --model llama-1b --json soak.json" in output
