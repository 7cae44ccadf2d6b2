"""Traces are read, or refused with the line that is wrong."""

from pathlib import Path

import pytest

from bcg_harness import HarnessError, Step
from bcg_harness.bench.scheduler import Request
from bcg_harness.bench.trace import read_trace, trace_workload


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return where a trace may be written."""
    return tmp_path / "monday.jsonl"


def test_a_line_is_a_request(trace: Path) -> None:
    trace.write_text('{"prompt_tokens": 7, "prefix_tokens": 3, "arrival_seconds": 0.5}\n')
    assert read_trace(trace) == [
        Request(prompt_tokens=7, prefix_tokens=3, arrival_seconds=0.0),
    ]


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
    workload = trace_workload(trace, token_budget=16, max_requests=4)
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
    workload = trace_workload(trace, token_budget=16, max_requests=4)
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
    assert trace_workload(trace, token_budget=16, max_requests=4).name == "monday"


def test_a_trace_may_be_given_another_name(trace: Path) -> None:
    trace.write_text(TRACE)
    assert trace_workload(trace, token_budget=16, max_requests=4, name="a").name == "a"


def test_a_trace_keeps_the_budgets_it_is_given(trace: Path) -> None:
    trace.write_text('{"prompt_tokens": 5}\n' * 7)
    workload = trace_workload(trace, token_budget=100, max_requests=3)
    assert workload.requests_per_step == (3, 3, 1)
    assert "7 requests, in batches of at most 100 tokens and 3 requests" in workload.description
