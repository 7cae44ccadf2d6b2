"""The project's own form of a trace: a JSON object a line, with the attributes of ``Request``."""

from collections.abc import Iterator

from bcg_harness.bench.json_line import Key, is_integer, is_number, read_line
from bcg_harness.bench.scheduler import Request
from bcg_harness.bench.trace_lines import Lines, read_each

SHAPE = (
    '{"prompt_tokens": 180, "prefix_tokens": 0, "arrival_seconds": 0.0, "output_tokens": 0}, all but the first of '
    "which may be left out"
)
_KEYS = {
    "prompt_tokens": Key(words="a whole number, at least 1", fits=is_integer, required=True),
    "prefix_tokens": Key(words="a whole number, at least 0", fits=is_integer),
    "arrival_seconds": Key(words="seconds since the start, at least 0", fits=is_number),
    "output_tokens": Key(words="a whole number, at least 0", fits=is_integer),
}


def read_own(lines: Lines) -> Iterator[tuple[int, Request]]:
    """Yield the requests with the numbers of their lines; raises HarnessError, with the number, for other lines."""
    return read_each(lines, lambda line: Request(**read_line(line, _KEYS, SHAPE)))
