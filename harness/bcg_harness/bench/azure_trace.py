"""Azure's traces of LLM inference, as they are published: CSV with a header.

``AzureLLMInferenceTrace_code.csv`` and ``_conv.csv`` of 2023, and those of 2024, whose time stamps carry a time zone:
https://github.com/Azure/AzurePublicDataset.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

from bcg_harness.bench.scheduler import Request
from bcg_harness.bench.trace_lines import Lines, read_each
from bcg_harness.errors import HarnessError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
SHAPE = "2023-11-16 18:15:46.6805900,374,44"


def read_azure(lines: Lines) -> Iterator[tuple[int, Request]]:
    """Yield the requests with the numbers of their lines; arrivals are Unix time, to the microsecond.

    Raises HarnessError, with the number, for another header and for a row that makes no sense.
    """
    rows = iter(lines)
    for number, line in rows:
        if line.strip() != HEADER:
            raise HarnessError(f"line {number}: found {line.strip()[:80]!r}, expected {HEADER}")
        break
    return read_each(rows, _request)


def _request(line: str) -> Request:
    try:
        stamp, context, generated = line.strip().split(",")
        arrival = datetime.fromisoformat(stamp)
        tokens, output = int(context), int(generated)
    except ValueError as error:
        raise HarnessError(
            f"found {line.strip()[:80]!r}, expected {HEADER}, such as {SHAPE}"
        ) from error
    if arrival.tzinfo is None:
        arrival = arrival.replace(tzinfo=UTC)
    return Request(prompt_tokens=tokens, output_tokens=output, arrival_seconds=arrival.timestamp())
