"""``bcg tune``: what it prints, what it writes, and how it exits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import TokenBuckets
from bcg_harness.bench.costs import BucketCost
from bcg_harness.bench.families import parse_workload
from bcg_harness.cli import app

MakeCost = Callable[..., BucketCost]
MIB = 2**20


@pytest.fixture
def costs(cost: MakeCost, costs_file: Callable[..., Path]) -> Path:
    """Return a file of costs of three buckets, all of which save time."""
    return costs_file(
        cost(16, replay=0.016, eager=0.10, capture=1.0, memory=1 * MIB),
        cost(64, replay=0.064, eager=0.15, capture=1.0, memory=1 * MIB),
        cost(256, replay=0.256, eager=0.40, capture=1.0, memory=64 * MIB),
    )


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("10 4\n60\n200\n")
    return path


@pytest.fixture
def tune(costs: Path) -> Callable[..., Result]:
    def run(*arguments: str | Path) -> Result:
        words = ["tune", "--costs", str(costs), *map(str, arguments)]
        return CliRunner().invoke(app, words, env={"COLUMNS": "120"})

    return run


def test_the_best_ladder_is_printed(tune: Callable[..., Result], lengths: Path) -> None:
    result = tune("--lengths", lengths)
    assert result.exit_code == 0, result.output
    assert "buckets: 16,64,256\n" in result.output


def test_other_ladders_stand_beside_it(tune: Callable[..., Result], lengths: Path) -> None:
    output = tune("--lengths", lengths).output
    rows = [
        line.split()[0] for line in output.splitlines() if "%" in line and "batches" not in line
    ]
    assert rows == ["proposed", "default", "one", "eager"]
    assert "default: costs of" in output
    assert "are interpolated between measured ones" in output


def test_the_figures_are_those_of_the_model(tune: Callable[..., Result], lengths: Path) -> None:
    (row,) = [line for line in tune("--lengths", lengths).output.splitlines() if "proposed" in line]
    latency = (4 * 16 + 64 + 256) / 6
    padding = 1 - (4 * 10 + 60 + 200) / (4 * 16 + 64 + 256)
    assert row.split()[1:3] == ["3", f"{latency:.3f}"]
    assert row.split()[-4:] == [f"{padding:.1%}", "0.0%", "3.00", "66.0"]


def test_the_context_of_the_costs_is_named(tune: Callable[..., Result], lengths: Path) -> None:
    output = " ".join(tune("--lengths", lengths).output.split())
    for part in ("costs: CPU emulator", "tiny (2 layers", "float32", "say nothing of a GPU"):
        assert part in output


def test_the_batches_are_summarised(tune: Callable[..., Result], lengths: Path) -> None:
    output = tune("--lengths", lengths).output
    assert "3 batches, 3 different token counts, 50.0 tokens on average, 200 at most" in output


@pytest.mark.parametrize(
    ("budget", "ladder", "broken"),
    [
        pytest.param(["--memory-budget", "17"], "16,64", "too much graph memory", id="memory"),
        pytest.param(["--memory-budget", "16.9"], "16", "too much graph memory", id="fraction"),
        pytest.param(["--start-up-budget", "1.5"], "16", "start-up takes too long", id="start-up"),
        pytest.param(["--max-buckets", "2"], "16,64", "too many buckets", id="buckets"),
    ],
)
def test_budgets_are_kept_and_the_default_ladder_says_which_it_breaks(
    tune: Callable[..., Result], lengths: Path, budget: list[str], ladder: str, broken: str
) -> None:
    output = tune("--lengths", lengths, *budget).output
    assert f"buckets: {ladder}\n" in output
    assert f"default: over budget: {broken}\n" in output


def test_a_step_considers_buckets_that_were_not_measured(
    tune: Callable[..., Result], lengths: Path
) -> None:
    output = tune("--lengths", lengths, "--step", "100").output
    assert "buckets: 16,64,200\n" in output
    assert "proposed: costs of 1 of 3 buckets are interpolated" in output


def test_batches_beyond_what_was_measured_are_pointed_out(
    tune: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("10 3\n1000\n")
    output = tune("--lengths", tmp_path / "long.txt").output
    assert "25.0% of the batches have more tokens than the largest measured bucket (256)" in output


def test_batches_below_what_was_measured_are_pointed_out(
    tune: Callable[..., Result], lengths: Path
) -> None:
    output = tune("--lengths", lengths).output
    assert "66.7% of the batches have fewer tokens than the smallest measured bucket (16)" in output
    assert "buckets are extrapolated from larger ones" in output


def test_one_of_something_is_no_plural(tune: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("100\n")
    output = tune("--lengths", tmp_path / "one.txt", "--step", "100").output
    assert "1 batch, 1 different token count, 100.0 tokens" in output
    assert "costs of 1 of 1 bucket are interpolated" in output


def test_without_budgets_none_is_spoken_of(
    cost: MakeCost, costs_file: Callable[..., Path], tune: Callable[..., Result], lengths: Path
) -> None:
    costs_file(cost(16, replay=1.0, eager=0.1))
    output = tune("--lengths", lengths).output
    assert "no ladder is faster than eager prefill\n" in output


# Where batches come from


def test_batches_come_from_workloads(tune: Callable[..., Result], tmp_path: Path) -> None:
    arguments = ["--workload", "chat-8", "--workload", "single-16", "--seed", "3"]
    result = tune(*arguments, "--token-budget", "300", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    chat = parse_workload("chat-8", seed=3, token_budget=300).batch_tokens()
    batches = json.loads((tmp_path / "out.json").read_text())["batches"]
    assert batches["count"] == len(chat) + 1
    assert batches["mean_tokens"] == pytest.approx((sum(chat) + 16) / (len(chat) + 1))


def test_batches_come_from_traces(tune: Callable[..., Result], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 50}\n' * 6)
    arguments = ["--trace", trace, "--token-budget", "150", "--max-requests", "2"]
    result = tune(*arguments, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    batches = json.loads((tmp_path / "out.json").read_text())["batches"]
    assert (batches["count"], batches["most_tokens"]) == (3, 100)


def test_sources_of_batches_add_up(tune: Callable[..., Result], lengths: Path) -> None:
    output = tune("--lengths", lengths, "--lengths", lengths, "--workload", "single-256").output
    assert "7 batches, 4 different token counts" in output


# What is written


def test_the_ladder_is_written_so_that_the_runner_loads_it(
    tune: Callable[..., Result], lengths: Path, tmp_path: Path
) -> None:
    result = tune("--lengths", lengths, "--output", tmp_path / "ladder.json")
    assert result.exit_code == 0, result.output
    assert f"written to {tmp_path / 'ladder.json'}" in result.output
    assert list(TokenBuckets.load(tmp_path / "ladder.json")) == [16, 64, 256]


def test_the_ladder_carries_where_it_comes_from(
    tune: Callable[..., Result], lengths: Path, costs: Path, tmp_path: Path
) -> None:
    tune("--lengths", lengths, "--output", tmp_path / "ladder.json")
    about = json.loads((tmp_path / "ladder.json").read_text())["about"]
    assert about["kind"] == "bcg tune"
    assert about["costs"] == str(costs)
    assert about["model"]["name"] == "tiny"
    assert about["expected"]["capture_seconds"] == 3.0


def test_json_holds_all_ladders_and_the_context(
    tune: Callable[..., Result], lengths: Path, tmp_path: Path
) -> None:
    tune("--lengths", lengths, "--memory-budget", "20", "--json", tmp_path / "out.json")
    raw = json.loads((tmp_path / "out.json").read_text())
    assert raw["backend"] == "sdpa"
    assert raw["budgets"]["memory_bytes"] == 20 * MIB
    assert raw["environment"]["engine"] == "CPU emulator"
    assert raw["settings"]["lengths"] == [str(lengths)]
    assert list(raw["ladders"]) == ["proposed", "default", "one bucket", "eager"]


def test_an_infinite_budget_is_written_as_none(
    tune: Callable[..., Result], lengths: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert tune("--lengths", lengths, "--memory-budget", "inf", "--json", path).exit_code == 0
    assert json.loads(path.read_text())["budgets"]["memory_bytes"] is None


def test_two_files_under_one_path_are_refused(
    tune: Callable[..., Result], lengths: Path, tmp_path: Path
) -> None:
    paths = ["--output", tmp_path / "out.json", "--json", tmp_path / "a" / ".." / "out.json"]
    result = tune("--lengths", lengths, *paths)
    assert result.exit_code == 2
    assert "--output and --json both name" in result.stderr


@pytest.mark.parametrize("written", ["--output", "--json"])
@pytest.mark.parametrize("read", ["--costs", "--lengths", "--trace"])
def test_what_is_read_is_not_overwritten(
    tune: Callable[..., Result], costs: Path, lengths: Path, tmp_path: Path, read: str, written: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_tokens": 50}\n')
    path = {"--costs": costs, "--lengths": lengths, "--trace": trace}[read]
    before = path.read_text()
    link = tmp_path / "link"
    link.symlink_to(path)
    result = tune("--lengths", lengths, "--trace", trace, written, link)
    assert result.exit_code == 2
    assert f"{read} and {written} both name {link}: give two files" in result.stderr
    assert path.read_text() == before


def test_a_trace_that_the_measured_model_cannot_hold_is_refused(
    tune: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text('{"prompt_tokens": 5, "prefix_tokens": 1000000}')
    result = tune("--trace", tmp_path / "long.jsonl")
    assert result.exit_code == 2
    assert "the longest has 1000005, cached ones included: no request is left" in result.stderr


LONG = '{"prompt_tokens": 50}\n{"prompt_tokens": 1000000}\n{"prompt_tokens": 60}\n'


@pytest.mark.parametrize(
    ("longer", "note"),
    [
        pytest.param([], "left out", id="default"),
        pytest.param(["--longer", "skip"], "left out", id="skip"),
        pytest.param(["--longer", "cut"], "cut", id="cut"),
    ],
)
def test_requests_beyond_the_context_are_counted_and_the_others_served(
    tune: Callable[..., Result], tmp_path: Path, longer: list[str], note: str
) -> None:
    (tmp_path / "long.jsonl").write_text(LONG)
    out = tmp_path / "out.json"
    result = tune("--trace", tmp_path / "long.jsonl", *longer, "--json", out)
    assert result.exit_code == 0, result.output
    expected = f"long: 1 of 3 requests are longer than the context of 2048 tokens: {note}"
    assert expected in result.output
    assert json.loads(out.read_text())["notes"] == [expected]


def test_requests_beyond_the_context_are_refused_when_asked_for(
    tune: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(LONG)
    result = tune("--trace", tmp_path / "long.jsonl", "--longer", "refuse")
    assert result.exit_code == 2
    assert "1 of 3 requests are longer than the context of the model" in result.stderr
    assert "--longer skip leaves them out, --longer cut shortens them" in result.stderr


def test_a_trace_of_azure_is_read_as_it_is_published(
    tune: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,100,44\n2023-11-16 18:15:50.9951690,200,109\n"
    )
    result = tune("--trace", tmp_path / "conv.csv")
    assert "2 batches, 2 different token counts, 150.0 tokens on average" in result.output


def test_without_a_ladder_nothing_is_written_and_the_exit_is_1(
    tune: Callable[..., Result], lengths: Path, tmp_path: Path
) -> None:
    old = tmp_path / "ladder.json"
    old.write_text("old")
    result = tune("--lengths", lengths, "--start-up-budget", "0", "--output", old)
    assert result.exit_code == 1
    assert "no ladder within these budgets is faster than eager prefill" in result.output
    assert "is not written" in result.stderr
    assert old.read_text() == "old"


def test_without_a_ladder_and_nothing_to_write_the_exit_is_0(
    tune: Callable[..., Result], lengths: Path
) -> None:
    assert tune("--lengths", lengths, "--start-up-budget", "0").exit_code == 0


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "nothing to tune for", id="no-batches"),
        pytest.param(["--workload", "chit-chat"], "no workload 'chit-chat'", id="workload"),
        pytest.param(["--workload", "single-9999"], "context of the model", id="context"),
        pytest.param(["--seed", "9" * 23], "seed", id="seed"),
        pytest.param(["--lengths", "nowhere.txt"], "nowhere.txt", id="lengths"),
        pytest.param(["--trace", "nowhere.jsonl"], "nowhere.jsonl", id="trace"),
        pytest.param(["--backend", "mosk"], "there are those of sdpa", id="backend"),
        pytest.param(["--memory-budget", "-1"], "memory-budget", id="memory-budget"),
        pytest.param(["--start-up-budget", "nan"], "start-up-budget", id="start-up-budget"),
        pytest.param(["--max-buckets", "0"], "max-buckets", id="max-buckets"),
        pytest.param(["--step", "1"], "larger --step", id="step"),
        pytest.param(["--output", "/no/such/place/out.json"], "cannot write", id="output"),
        pytest.param(["--json", "/no/such/place/out.json"], "cannot write", id="json"),
        pytest.param(["--costs", "nowhere.json"], "nowhere.json", id="costs"),
    ],
)
def test_wrong_use_exits_with_2_and_says_what_is_possible(
    tune: Callable[..., Result], lengths: Path, arguments: list[str], message: str
) -> None:
    given = ["--lengths", str(lengths)] if arguments else []
    result = tune(*given, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_malformed_line_is_named(tune: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("10\nmany\n")
    result = tune("--lengths", tmp_path / "bad.txt")
    assert result.exit_code == 2
    assert "bad.txt, line 2: found 'many', expected tokens" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "is no JSON", id="damaged"),
        pytest.param("{}", "no result of `bcg bench --json`", id="another-file"),
    ],
)
def test_a_file_without_results_is_named(
    tune: Callable[..., Result], lengths: Path, costs: Path, text: str, message: str
) -> None:
    costs.write_text(text)
    result = tune("--lengths", lengths)
    assert result.exit_code == 2
    assert "costs.json" in result.stderr
    assert message in result.stderr


def test_results_without_bucket_costs_say_how_to_get_them(
    tune: Callable[..., Result], lengths: Path, costs_file: Callable[..., Path]
) -> None:
    costs_file()
    result = tune("--lengths", lengths)
    assert result.exit_code == 2
    assert "bcg bench --bucket-costs" in result.stderr


def test_costs_of_several_backends_want_a_choice(
    tune: Callable[..., Result],
    lengths: Path,
    cost: MakeCost,
    costs_file: Callable[..., Path],
) -> None:
    costs_file(cost(16, backend="one"), cost(16, backend="two"))
    result = tune("--lengths", lengths)
    assert result.exit_code == 2
    assert "there are costs of one, two: choose one with --backend" in result.stderr


def test_costs_are_required(lengths: Path) -> None:
    result = CliRunner().invoke(app, ["tune", "--lengths", str(lengths)])
    assert result.exit_code == 2
    assert "--costs" in result.stderr


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "120"})
    assert "bcg tune --costs costs.json --lengths lengths.txt" in result.output
