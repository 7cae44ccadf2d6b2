"""Traces are read, or refused with the line that is wrong."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bcg_harness import HarnessError, Step
from bcg_harness.bench.longer import Longer
from bcg_harness.bench.scheduler import Request
from bcg_harness.bench.trace import DECODE_SECONDS, Trace, read_trace
from bcg_harness.bench.workloads import Workload
from bcg_harness.progress import NoProgress


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return where a trace may be written."""
    return tmp_path / "monday.jsonl"


def test_a_line_is_a_request(trace: Path) -> None:
    trace.write_text('{"prompt_tokens": 7, "prefix_tokens": 3, "arrival_seconds": 0.5}\n')
    assert read_trace(trace) == [
        Request(prompt_tokens=7, prefix_tokens=3, arrival_seconds=0.0),
    ]


def test_a_line_may_say_how_many_tokens_were_generated(trace: Path) -> None:
    trace.write_text('{"prompt_tokens": 7, "output_tokens": 20}')
    assert read_trace(trace) == [Request(prompt_tokens=7, output_tokens=20)]


def test_prefix_and_arrival_may_be_left_out(trace: Path) -> None:
    trace.write_text('{"prompt_tokens": 7}')
    assert read_trace(trace) == [Request(prompt_tokens=7)]


def test_blank_lines_are_skipped(trace: Path) -> None:
    trace.write_bytes(b'\n{"prompt_tokens": 7}\r\n \r\n{"prompt_tokens": 8}\r\n')
    assert [request.prompt_tokens for request in read_trace(trace)] == [7, 8]


def test_requests_are_sorted_by_arrival_and_otherwise_stay_in_order(trace: Path) -> None:
    arrivals = {1: 2, 2: 0.5, 3: 2.0, 4: 0}
    trace.write_text(
        "\n".join(
            f'{{"prompt_tokens": {tokens}, "arrival_seconds": {at}}}'
            for tokens, at in arrivals.items()
        )
    )
    assert [request.prompt_tokens for request in read_trace(trace)] == [4, 2, 1, 3]


@pytest.mark.parametrize("begin", ["0", "1e300", "1.7e9"], ids=["zero", "huge", "unix-time"])
def test_arrivals_count_from_the_first_whatever_the_clock(trace: Path, begin: str) -> None:
    trace.write_text(f'{{"prompt_tokens": 5, "arrival_seconds": {begin}}}')
    workload = Trace.read(trace).workload(token_budget=16, max_requests=4)
    assert workload.time_to_first_token([0.25]) == {0: 0.25}


def test_a_trace_that_spans_ages_is_refused_with_its_line(trace: Path) -> None:
    line = '{"prompt_tokens": 5, "arrival_seconds": 2e9}'
    trace.write_text(f'{{"prompt_tokens": 5}}\n\n{line}\n')
    with pytest.raises(HarnessError, match=r"line 3: arrival_seconds is 2000000000\.0.*at most"):
        read_trace(trace)


def test_a_byte_order_mark_is_no_part_of_a_trace(trace: Path) -> None:
    trace.write_bytes(b'\xef\xbb\xbf{"prompt_tokens": 7}')
    assert read_trace(trace) == [Request(prompt_tokens=7)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{", "no JSON: .*expected", id="no-json"),
        pytest.param("[" * 100_000, "no JSON: .*expected", id="nested-too-deeply"),
        pytest.param('{"prompt_tokens": ' + "9" * 5000 + "}", "no JSON", id="too-many-digits"),
        pytest.param(
            '{"prompt_tokens": 7, "prompt_tokens": 8}',
            'the key "prompt_tokens" is there twice',
            id="twice",
        ),
        pytest.param("[7]", r"found \[7\], expected", id="no-object"),
        pytest.param("7", "found 7, expected", id="number"),
        pytest.param("{}", r"found \{\}, expected", id="no-prompt"),
        pytest.param(
            '{"prompt_tokens": 7, "prompt_token": 7}',
            'unknown key "prompt_token"; possible are prompt_tokens, prefix_tokens',
            id="unknown-key",
        ),
        pytest.param(
            '{"prompt_tokens": "7"}',
            'prompt_tokens is "7", expected a whole number, at least 1',
            id="text",
        ),
        pytest.param('{"prompt_tokens": 7.0}', "prompt_tokens is 7.0, expected", id="fraction"),
        pytest.param('{"prompt_tokens": true}', "prompt_tokens is true, expected", id="boolean"),
        pytest.param('{"prompt_tokens": null}', "prompt_tokens is null, expected", id="null"),
        pytest.param('{"prompt_tokens": 0}', "prompt_tokens is 0, expected at least 1", id="zero"),
        pytest.param(
            '{"prompt_tokens": 7, "prefix_tokens": -1}',
            "prefix_tokens is -1, expected at least 0",
            id="negative-prefix",
        ),
        pytest.param('{"prompt_tokens": 1048577}', ".*at most 1048576", id="too-long"),
        pytest.param(
            '{"prompt_tokens": 7, "arrival_seconds": false}',
            "arrival_seconds is false, expected seconds",
            id="boolean-arrival",
        ),
        pytest.param(
            '{"prompt_tokens": 7, "arrival_seconds": NaN}', "arrival_seconds is nan", id="nan"
        ),
        pytest.param(
            '{"prompt_tokens": 7, "arrival_seconds": 1e999}',
            "arrival_seconds is inf",
            id="infinite",
        ),
        pytest.param(
            '{"prompt_tokens": 7, "arrival_seconds": -1}', "arrival_seconds is -1", id="negative"
        ),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_with_its_number(
    trace: Path, line: str, message: str
) -> None:
    trace.write_text(f'{{"prompt_tokens": 7}}\n\n{line}\n{{"prompt_tokens": 7}}\n')
    with pytest.raises(HarnessError, match=rf"monday\.jsonl, line 3: {message}"):
        read_trace(trace)


def test_a_message_quotes_no_more_than_the_beginning_of_a_long_line(trace: Path) -> None:
    trace.write_text(f"[{'1, ' * 10_000}1]")
    with pytest.raises(HarnessError) as caught:
        read_trace(trace)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["", "\n \n"], ids=["empty", "blank"])
def test_a_trace_without_requests_is_refused(trace: Path, text: str) -> None:
    trace.write_text(text)
    with pytest.raises(HarnessError, match=r"monday\.jsonl is a trace without requests: expected"):
        read_trace(trace)


def test_a_missing_trace_is_named(trace: Path) -> None:
    with pytest.raises(HarnessError, match=r"cannot read .*monday\.jsonl"):
        read_trace(trace)


def test_a_trace_of_other_encoding_is_refused(trace: Path) -> None:
    trace.write_bytes(b"\xff\xfe{}")
    with pytest.raises(HarnessError, match=r"monday\.jsonl.*give a UTF-8 text file"):
        read_trace(trace)


TRACE = """
{"prompt_tokens": 6, "arrival_seconds": 1.0}
{"prompt_tokens": 20, "prefix_tokens": 30, "arrival_seconds": 0.5}
"""


def test_a_trace_is_packed_into_batches_with_its_arrivals(trace: Path) -> None:
    trace.write_text(TRACE)
    workload = Trace.read(trace).workload(token_budget=16, max_requests=4)
    assert workload.case.steps == (
        Step(requests=((0, 16),), checked=False),
        Step(requests=((0, 14),), checked=False),
        Step(requests=((0, 16),)),
        Step(requests=((0, 4),)),
        Step(requests=((1, 6),)),
    )
    assert workload.arrivals == {0: 0.0, 1: 0.5}


def test_a_trace_is_named_after_its_file(trace: Path) -> None:
    trace.write_text(TRACE)
    assert Trace.read(trace).workload(token_budget=16, max_requests=4).name == "monday"


def test_a_trace_keeps_the_budgets_it_is_given(trace: Path) -> None:
    trace.write_text('{"prompt_tokens": 5}\n' * 7)
    workload = Trace.read(trace).workload(token_budget=100, max_requests=3)
    assert workload.requests_per_step == (3, 3, 1)
    assert "7 requests, in batches of at most 100 tokens and 3 requests" in workload.description


# Azure's CSV

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.9305900,879,55
"""


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    """Return where a trace of Azure may be written."""
    return tmp_path / "AzureLLMInferenceTrace_conv.csv"


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_a_trace_of_azure_is_read_as_it_is_published(azure: Path, end: str) -> None:
    azure.write_bytes(AZURE.replace("\n", end).encode())
    read = read_trace(azure)
    assert [request.prompt_tokens for request in read] == [374, 879, 396]
    assert [request.output_tokens for request in read] == [44, 55, 109]
    assert [request.arrival_seconds for request in read] == pytest.approx([0.0, 0.25, 4.314579])


def test_time_stamps_of_azure_may_have_a_zone_and_no_fraction(azure: Path) -> None:
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
    )
    arrivals = [request.arrival_seconds for request in read_trace(azure)]
    assert arrivals == pytest.approx([0.0, 0.99007])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param(
            "yesterday,374,44", "found 'yesterday,374,44', expected TIMESTAMP,", id="time"
        ),
        pytest.param("2023-11-16 18:15:46,many,44", "expected TIMESTAMP,.*such as", id="tokens"),
        pytest.param("2023-11-16 18:15:46,374", "expected TIMESTAMP,.*such as", id="too-few"),
        pytest.param("2023-11-16 18:15:46,374,4,4", "expected TIMESTAMP", id="too-many"),
        pytest.param("2023-11-16 18:15:46,0,44", "prompt_tokens is 0", id="no-prompt"),
        pytest.param("2023-11-16 18:15:46,374,-1", "output_tokens is -1", id="negative"),
    ],
)
def test_a_row_of_azure_that_makes_no_sense_is_refused_with_its_number(
    azure: Path, row: str, message: str
) -> None:
    azure.write_text(f"{AZURE}{row}\n")
    with pytest.raises(HarnessError, match=rf"_conv\.csv, line 5: .*{message}"):
        read_trace(azure)


def test_other_csv_is_refused_with_the_header_that_is_expected(azure: Path) -> None:
    azure.write_text("Timestamp,Model,Request tokens\n5,ChatGPT,472\n")
    with pytest.raises(
        HarnessError,
        match=r"line 1: found 'Timestamp,Model.*expected TIMESTAMP,ContextTokens,GeneratedTokens",
    ):
        read_trace(azure)


def test_a_header_alone_is_a_trace_without_requests(azure: Path) -> None:
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    with pytest.raises(HarnessError, match="is a trace without requests"):
        read_trace(azure)


# Mooncake's JSON lines


def mooncake(*prompts: tuple[int, list[int]], every: int = 1500) -> str:
    """Return a trace of prompts, each its length and hashes, as it is published."""
    return "".join(
        f'{{"timestamp": {place * every}, "input_length": {length}, "output_length": {place}, '
        f'"hash_ids": {hashes}}}\n'
        for place, (length, hashes) in enumerate(prompts)
    )


def test_a_trace_of_mooncake_is_read_as_it_is_published(trace: Path) -> None:
    trace.write_text(mooncake((1100, [46, 47, 48]), (655, [49, 50])))
    assert read_trace(trace) == [
        Request(prompt_tokens=1100),
        Request(prompt_tokens=655, arrival_seconds=1.5, output_tokens=1),
    ]


PREFIXES: dict[str, tuple[tuple[tuple[int, list[int]], ...], list[int]]] = {
    "none": (((600, [1, 2]), (600, [3, 4])), [0, 0]),
    "whole-blocks": (((1536, [1, 2, 3]), (1700, [1, 2, 4, 5])), [0, 1024]),
    "earlier-one-goes-on": (((1100, [1, 2, 3]), (1600, [1, 2, 4, 5])), [0, 1024]),
    "all-but-one-token": (((1024, [1, 2]), (1024, [1, 2])), [0, 1023]),
    "last-block-is-not-full": (((655, [1, 2]), (672, [1, 2])), [0, 655]),
    "longest-of-several": (((512, [1]), (1536, [1, 2, 3]), (1600, [1, 2, 3, 4])), [0, 512, 1536]),
    "same-hash-elsewhere-is-no-prefix": (((1024, [1, 2]), (1024, [2, 1])), [0, 0]),
    "gap": (((1536, [1, 2, 3]), (1536, [1, 9, 3])), [0, 512]),
    "no-hashes": (((1024, []), (1024, [])), [0, 0]),
}


@pytest.mark.parametrize(("prompts", "prefixes"), PREFIXES.values(), ids=PREFIXES)
def test_what_hashes_share_with_earlier_requests_is_a_cached_prefix(
    trace: Path, prompts: tuple[tuple[int, list[int]], ...], prefixes: list[int]
) -> None:
    trace.write_text(mooncake(*prompts))
    read = read_trace(trace)
    assert [request.prefix_tokens for request in read] == prefixes
    assert [request.total_tokens for request in read] == [length for length, _ in prompts]


def test_sharing_goes_by_arrival_and_not_by_the_order_of_lines(trace: Path) -> None:
    lines = mooncake((1024, [1, 2]), (1536, [1, 2, 3])).splitlines()
    trace.write_text("\n".join(reversed(lines)))
    assert [request.prefix_tokens for request in read_trace(trace)] == [0, 1024]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(("1100", "0"), "prompt_tokens is 0", id="no-prompt"),
        pytest.param(('"input_length": 1100', '"input_length": "a"'), 'is "a"', id="text"),
        pytest.param(("[1, 2, 3]", "7"), "hash_ids is 7, expected a list", id="no-list"),
        pytest.param(("[1, 2, 3]", "[true]"), r"hash_ids is \[true\]", id="boolean"),
        pytest.param(('"output_length": 1, ', ""), "expected {.timestamp", id="no-output"),
        pytest.param(('"timestamp": 1500', '"timestamp": -1'), "arrival_seconds", id="before"),
        pytest.param(
            ('"output_length"', '"chat_id": 5, "output_length"'),
            'unknown key "chat_id"; possible are timestamp, input_length',
            id="another-form",
        ),
    ],
)
def test_a_line_of_mooncake_that_makes_no_sense_is_refused_with_its_number(
    trace: Path, change: tuple[str, str], message: str
) -> None:
    good, bad = mooncake((600, [1, 2]), (1100, [1, 2, 3])).splitlines()
    trace.write_text(f"{good}\n\n{bad.replace(*change)}\n")
    with pytest.raises(HarnessError, match=rf"monday\.jsonl, line 3: .*{message}"):
        read_trace(trace)


# Requests beyond the context

BEYOND = """
{"prompt_tokens": 100}
{"prompt_tokens": 5, "prefix_tokens": 200, "output_tokens": 9}
{"prompt_tokens": 101}
{"prompt_tokens": 40, "prefix_tokens": 60}
"""


def fitted(trace: Path, longer: Longer) -> Workload:
    trace.write_text(BEYOND)
    return Trace.read(trace).workload(
        token_budget=1000, max_requests=8, max_context=100, longer=longer
    )


def test_requests_beyond_the_context_are_skipped_and_counted(trace: Path) -> None:
    workload = fitted(trace, Longer.SKIP)
    assert workload.lengths == {0: 100, 1: 100}
    assert (workload.left_out, workload.cut) == (2, 0)
    assert workload.notes == (
        "2 of 4 requests are longer than the context of 100 tokens: left out",
    )


def test_requests_beyond_the_context_are_cut_and_counted(trace: Path) -> None:
    workload = fitted(trace, Longer.CUT)
    assert workload.lengths == dict.fromkeys(range(4), 100)
    assert workload.record().steps == (((0, 100), (99, 1), (0, 100), (60, 40)),)
    assert (workload.left_out, workload.cut) == (0, 2)
    assert workload.notes == ("2 of 4 requests are longer than the context of 100 tokens: cut",)


def test_requests_beyond_the_context_can_be_refused_with_a_way_out(trace: Path) -> None:
    with pytest.raises(
        HarnessError,
        match=r"monday\.jsonl: 2 of 4 requests are longer .* 100 tokens; the longest has 205.*--longer skip",
    ):
        fitted(trace, Longer.REFUSE)


def test_a_trace_of_which_nothing_is_left_is_refused(trace: Path) -> None:
    trace.write_text('{"prompt_tokens": 101}')
    with pytest.raises(HarnessError, match="no request is left; --longer cut shortens them"):
        Trace.read(trace).workload(token_budget=16, max_requests=4, max_context=100)


def test_counts_are_in_the_record_and_the_description(trace: Path) -> None:
    workload = fitted(trace, Longer.SKIP)
    assert (workload.record().left_out, workload.record().cut) == (2, 0)
    assert "2 requests, in batches" in workload.description
    assert workload.description.endswith(
        "2 of 4 requests are longer than the context of 100 tokens: left out"
    )


# An hour of traffic


def hour(path: Path, requests: int = 19_366) -> Path:
    """Write an hour of traffic, as Azure publishes it: the lengths and the rate of its conversations, about."""
    begin = datetime(2023, 11, 16, 18, 15, 46, tzinfo=UTC)
    rows = [
        f"{begin + timedelta(seconds=3500 * place / requests):%Y-%m-%d %H:%M:%S.%f}0,"
        f"{1 + place * 7919 % 2310},{1 + place * 104_729 % 422}"
        for place in range(requests)
    ]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


def test_an_hour_of_traffic_takes_the_pages_of_the_requests_that_are_there_at_once(
    azure: Path,
) -> None:
    trace = Trace.read(hour(azure))
    workload = trace.workload(token_budget=2048, max_requests=64)
    assert len(trace.requests) == 19_366
    assert sum(workload.lengths.values()) > 22_000_000
    assert workload.kv_pages(16) * 16 < 200_000


def test_requests_hold_their_pages_while_they_decode(azure: Path) -> None:
    trace = Trace.read(hour(azure, requests=200))
    workload = trace.workload(token_budget=2048, max_requests=64)
    assert workload.leaves[7] == pytest.approx(
        trace.requests[7].arrival_seconds + trace.requests[7].output_tokens * DECODE_SECONDS
    )


class Told(NoProgress):
    """Remember what was said."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.done = 0

    def start(self, what: str, total: int) -> None:
        self.phases.append((what, total))

    def advance(self, count: int = 1) -> None:
        self.done += count


def test_reading_tells_of_its_progress(azure: Path) -> None:
    told = Told()
    read_trace(hour(azure, requests=10_000), told)
    assert told.phases == [(f"reading {azure.name}", 10_001)]
    assert told.done == 8192
