"""``bcg bench``: what it prints, what it writes, and how it exits."""

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, registry
from bcg_harness import cli_bench
from bcg_harness.bench.bench import Bench
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.tables import latency_tables
from bcg_harness.cli import app
from bcg_harness.errors import DeviceLostError

QUICK = ["bench", "--backend", "sdpa", "--seconds", "0", "--buckets", "16,64"]


def bcg(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def only_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes these the only registered backends, beside sdpa."""

    def register(**values: str) -> None:
        values["sdpa"] = "bcg_backends.sdpa:SDPABackend"
        points = {
            name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()
        }
        monkeypatch.setattr(registry, "_installed", lambda: points)

    return register


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Any]:
    path = tmp_path_factory.mktemp("json") / "out.json"
    workloads = ["--workload", "single-40", "--workload", "chunked-100x50"]
    result = bcg(*QUICK, *workloads, "--bucket-costs", "--json", str(path))
    assert result.exit_code == 0, result.output
    return result, json.loads(path.read_text())


def test_the_json_can_be_read_back(written: tuple[Result, Any]) -> None:
    raw = written[1]
    assert json.loads(json.dumps(BenchReport.from_json(raw).to_json())) == raw


def test_the_json_carries_its_context(written: tuple[Result, Any]) -> None:
    raw = written[1]
    assert raw["environment"]["engine"] == "CPU emulator"
    assert raw["environment"]["libraries"]["torch"] == torch.__version__
    assert (raw["model"]["name"], raw["model"]["num_layers"]) == ("tiny", 4)
    assert raw["settings"]["buckets"] == [16, 64]
    assert [workload["name"] for workload in raw["workloads"]] == ["single-40", "chunked-100x50"]
    assert raw["workloads"][1]["steps"] == [[[0, 50]], [[50, 50]]]


def test_every_mode_has_a_cell_for_every_workload(written: tuple[Result, Any]) -> None:
    cells = [(cell["mode"], cell["workload"]) for cell in written[1]["cells"]]
    modes = ["eager", "padded_eager", "breakable", "full"]
    assert sorted(cells) == sorted((m, w) for m in modes for w in ("single-40", "chunked-100x50"))


def test_bucket_costs_are_there_when_asked_for(written: tuple[Result, Any]) -> None:
    assert [cost["bucket"] for cost in written[1]["bucket_costs"]] == [16, 64]


def test_the_summary_names_modes_workloads_and_the_emulator(written: tuple[Result, Any]) -> None:
    output = written[0].output
    for part in ("single-40", "chunked-100x50", "breakable", "set-up", "CPU emulator"):
        assert part in output
    assert "sdpa / full (2 workloads)" in output
    assert "6 measured, each between two passing checks, 2 not available" in output


def test_a_trace_is_a_workload(tmp_path: Path) -> None:
    trace = tmp_path / "morning.jsonl"
    trace.write_text('{"prompt_tokens": 20}\n{"prompt_tokens": 9, "prefix_tokens": 30}\n')
    result = bcg(*QUICK, "--trace", str(trace), "--mode", "breakable")
    assert result.exit_code == 0, result.output
    assert "morning" in result.output


PUBLISHED = {
    "azure": (
        "conv.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,20,44\n"
        "2023-11-16 18:15:47.9951690,30,109\n2023-11-16 18:15:48.2224670,4096,55\n",
        [[[0, 20]], [[0, 30]]],
    ),
    "mooncake": (
        "toolagent.jsonl",
        '{"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [0]}\n'
        '{"timestamp": 3000, "input_length": 30, "output_length": 5, "hash_ids": [0]}\n'
        '{"timestamp": 3000, "input_length": 4096, "output_length": 5, "hash_ids": [1, 2]}\n',
        [[[0, 20]], [[20, 10]]],
    ),
}


@pytest.mark.parametrize(("name", "text", "steps"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_traces_are_measured_less_what_is_longer_than_the_context(
    tmp_path: Path, name: str, text: str, steps: list[Any]
) -> None:
    trace, out = tmp_path / name, tmp_path / "out.json"
    trace.write_text(text)
    result = bcg(*QUICK, "--trace", str(trace), "--mode", "eager", "--json", str(out))
    assert result.exit_code == 0, result.output
    note = "1 of 3 requests are longer than the context of 2048 tokens: left out"
    assert f"{trace.stem}: {note}" in result.output
    raw = json.loads(out.read_text())
    (workload,) = raw["workloads"]
    assert (workload["steps"], workload["left_out"], workload["cut"]) == (steps, 1, 0)
    assert raw["settings"]["longer"] == "skip"
    assert raw["notes"][trace.stem] == [note]


def test_a_trace_with_a_request_beyond_the_context_is_refused_when_asked_for(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "morning.jsonl"
    trace.write_text('{"prompt_tokens": 20}\n{"prompt_tokens": 4096}\n')
    result = bcg(*QUICK, "--trace", str(trace), "--longer", "refuse")
    assert result.exit_code == 2, result.output
    assert "--longer skip leaves them out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "faster"], "no mode 'faster'"),
        (["--workload", "single"], "no workload 'single'"),
        (["--workload", "single-4096"], "2048"),
        (["--backend", "nobody"], "nobody"),
        (["--device", "cuda"], "sees"),
        (["--model", "nowhere"], "nowhere"),
        (["--buckets", "64,16"], "64"),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
        (["--json", "no/such/folder.json"], "no/such/folder.json"),
    ],
    ids=[
        "mode",
        "workload",
        "context",
        "backend",
        "device",
        "model",
        "buckets",
        "trace",
        "json",
    ],
)
def test_wrong_use_ends_with_2_and_a_reason(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda" in arguments:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = bcg("bench", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seconds", "inf"), ("--seconds", "nan"), ("--seed", "9" * 23)],
    ids=["infinite-seconds", "no-seconds", "seed"],
)
def test_a_number_out_of_range_ends_with_2(option: str, value: str) -> None:
    result = bcg("bench", option, value)
    assert result.exit_code == 2, result.output
    assert option in result.stderr


def test_a_malformed_trace_names_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"prompt_tokens": 20}\n{"prompt_tokens": -1}\n')
    result = bcg("bench", "--trace", str(trace))
    assert result.exit_code == 2
    assert "bad.jsonl:2" in result.stderr.replace("\n", "") or "line 2" in result.stderr


def test_a_wrong_backend_gets_no_time_and_ends_with_1(only_backends: Callable[..., None]) -> None:
    only_backends(wrong="bcg_harness.testing:ScalesTooMuch")
    result = bcg("bench", "--backend", "wrong", "--seconds", "0", "--workload", "single-40")
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.output
    assert "0 measured" in result.output


def test_nothing_measured_is_no_success() -> None:
    result = bcg("bench", "--backend", "xformers", "--workload", "single-16")
    assert result.exit_code == 1, result.output
    assert "0 measured" in result.output
    assert "xformers" in result.output


def test_default_workloads_that_do_not_fit_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli_bench, "default_workloads", lambda device: ("single-16", "single-4096"))
    result = bcg(*QUICK, "--mode", "eager")
    assert result.exit_code == 0, result.output
    assert "left out" in result.output
    assert "single-4096" in result.output


def test_a_lost_gpu_ends_the_run_and_says_after_what(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(self: Bench, group: Any, prepared: Any, workload: Any) -> Any:
        raise DeviceLostError("the GPU is lost to this process after mode 'eager'")

    monkeypatch.setattr(Bench, "measure", lose)
    result = bcg(*QUICK, "--workload", "single-16")
    assert result.exit_code == 1, result.output
    assert "lost to this process after mode 'eager'" in result.output


def test_an_interrupted_run_shows_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Bench.measure

    def stop_at_the_second(self: Bench, group: Any, prepared: Any, workload: Any) -> Any:
        if workload.name == "single-17":
            raise KeyboardInterrupt
        return measure(self, group, prepared, workload)

    monkeypatch.setattr(Bench, "measure", stop_at_the_second)
    result = bcg(*QUICK, "--mode", "eager", "--workload", "single-16", "--workload", "single-17")
    assert result.exit_code == 130
    assert "1 measured" in result.output
    assert "interrupted" in result.output


def test_a_batch_that_ran_without_a_graph_is_marked_and_explained() -> None:
    result = bcg(*QUICK, "--mode", "breakable", "--workload", "single-100")
    assert result.exit_code == 0, result.output
    assert "* single-100: ran eagerly in modes with graphs" in result.output
    assert "more tokens than the largest bucket (64)" in result.output


def test_a_narrow_terminal_gets_several_tables_with_whole_names(
    written: tuple[Result, Any],
) -> None:
    report = BenchReport.from_json(written[1])
    tables = list(latency_tables(report, "sdpa", width=60))
    assert len(tables) == 2
    assert [len(table.columns) for table in tables] == [4, 4]


def test_a_wide_terminal_gets_one_table(written: tuple[Result, Any]) -> None:
    assert len(list(latency_tables(BenchReport.from_json(written[1]), "sdpa", width=160))) == 1
