"""Traces: what a server received, as lines of JSON, and the workload that it makes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bcg_harness.bench.scheduler import Request, pack
from bcg_harness.bench.workloads import Workload
from bcg_harness.cases import Case
from bcg_harness.errors import HarnessError
from bcg_harness.selection import read_text

_SHAPE = '{"prompt_tokens": 180, "prefix_tokens": 0, "arrival_seconds": 0.0}, the last two of which may be left out'

MOST_SECONDS = 1e9
"""The longest trace that makes sense, some thirty years; floats still tell microseconds apart there."""


def read_trace(path: Path) -> list[Request]:
    """Read a file of one JSON object a line; returns its requests in order of arrival.

    Keys are the attributes of ``Request``; ``prefix_tokens`` and ``arrival_seconds`` may be left out. Blank lines are
    skipped, and lines may be in any order: requests that arrive together stay in the order of the file. Arrivals count
    from that of the first request, whatever the clock of the file; none may come more than ``MOST_SECONDS`` later.

    Raises HarnessError, with path and line number, saying what was found and what was expected.
    """
    requests: dict[int, Request] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            requests[number] = _request(line)
        except HarnessError as error:
            raise HarnessError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise HarnessError(f"{path} is a trace without requests: expected lines such as {_SHAPE}")
    begin = min(request.arrival_seconds for request in requests.values())
    shifted = []
    for number, request in requests.items():
        since = request.arrival_seconds - begin
        if since > MOST_SECONDS:
            raise HarnessError(
                f"{path}, line {number}: arrival_seconds is {request.arrival_seconds}, {since:g} s after the first "
                f"request of the trace; at most {MOST_SECONDS:g} s are possible"
            )
        shifted.append(replace(request, arrival_seconds=since))
    return sorted(shifted, key=lambda request: request.arrival_seconds)


def trace_workload(
    path: Path, *, token_budget: int, max_requests: int, name: str | None = None
) -> Workload:
    """Return the workload that a trace makes when its requests are packed into batches.

    Args:
        path: of a file for ``read_trace``.
        token_budget: most new tokens of a batch.
        max_requests: most requests of a batch.
        name: of the workload; the file's name without its ending when left out.

    Raises:
        HarnessError: for a file or budgets that make no sense.
    """
    requests = read_trace(path)
    steps = pack(requests, token_budget=token_budget, max_requests=max_requests)
    description = (
        f"trace {path.name}: {len(requests)} requests, in batches of at most {token_budget} tokens and {max_requests} "
        "requests"
    )
    return Workload(
        case=Case(name=name or path.stem, description=description, steps=steps),
        arrivals={sequence: request.arrival_seconds for sequence, request in enumerate(requests)},
    )


def _request(line: str) -> Request:
    try:
        raw: Any = json.loads(line, object_pairs_hook=_object)
    except HarnessError:
        raise
    except (ValueError, RecursionError) as error:
        raise HarnessError(f"no JSON: {error}; expected {_SHAPE}") from error
    if not isinstance(raw, dict) or "prompt_tokens" not in raw:
        raise HarnessError(f"found {_shorten(raw)}, expected {_SHAPE}")
    for key, value in raw.items():
        if key not in _TYPES:
            raise HarnessError(f"unknown key {_shorten(key)}; possible are {', '.join(_TYPES)}")
        types, words = _TYPES[key]
        # Not isinstance: to Python, true is an integer.
        if type(value) not in types:
            raise HarnessError(f"{key} is {_shorten(value)}, expected {words}")
    return Request(**raw)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises HarnessError for a key that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise HarnessError(f"the key {_shorten(twice)} is there twice: keep one")
    return found


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "prompt_tokens": ((int,), "a whole number, at least 1"),
    "prefix_tokens": ((int,), "a whole number, at least 0"),
    "arrival_seconds": ((int, float), "seconds since the start, at least 0"),
}


def _shorten(raw: Any) -> str:
    text = json.dumps(raw)
    return text if len(text) <= 80 else f"{text[:80]}..."
