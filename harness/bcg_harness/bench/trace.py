"""Traces: what a server received, in one of several forms, and the workload that it makes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bcg_harness.bench import azure_trace, mooncake_trace, own_trace
from bcg_harness.bench.longer import Longer
from bcg_harness.bench.scheduler import Request, pack
from bcg_harness.bench.trace_lines import Lines
from bcg_harness.bench.workloads import Workload
from bcg_harness.cases import Case
from bcg_harness.errors import HarnessError
from bcg_harness.progress import NoProgress, Progress
from bcg_harness.selection import read_text

MOST_SECONDS = 1e9
"""The longest trace that makes sense, some thirty years; floats still tell microseconds apart there."""

STRETCH_TOKENS = 2**16
"""About how many tokens of a trace are measured in one piece; the KV cache holds those, and what still decodes."""

DECODE_SECONDS = 0.025
"""How long a request is taken to hold its pages for each token that it generates: nothing is decoded here."""

_LINES_AT_A_TIME = 4096


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Hold the requests of a file.

    Attributes:
        name: of the workload: the file's name without its ending.
        path: of the file.
        requests: in order of arrival, counted from the first.
    """

    name: str
    path: Path = field(compare=False)
    requests: tuple[Request, ...]

    @classmethod
    def read(cls, path: Path, progress: Progress | None = None) -> "Trace":
        """Read a file; errors as in ``read_trace``."""
        return cls(name=path.stem, path=path, requests=tuple(read_trace(path, progress)))

    def workload(
        self,
        *,
        token_budget: int,
        max_requests: int,
        max_context: int | None = None,
        longer: Longer = Longer.SKIP,
    ) -> Workload:
        """Return the workload that the requests make when they are packed into batches.

        Args:
            token_budget: most new tokens of a batch.
            max_requests: most requests of a batch.
            max_context: of the model; None where it is not known.
            longer: what becomes of requests beyond it.

        Raises:
            HarnessError: for budgets that make no sense, and for requests beyond the context that are to be refused, or
                are all there is.
        """
        requests, notes = list(self.requests), tuple[str, ...]()
        beyond = 0 if max_context is None else sum(r.total_tokens > max_context for r in requests)
        if max_context is not None and beyond:
            requests = self._fitted(max_context, longer, beyond)
            notes = (
                f"{beyond} of {len(self.requests)} requests are longer than the context of {max_context} tokens: "
                f"{'cut' if longer is Longer.CUT else 'left out'}",
            )
        description = (
            f"trace {self.path.name}: {len(requests)} requests, in batches of at most {token_budget} tokens and "
            f"{max_requests} requests"
        )
        return Workload(
            case=Case(
                name=self.name,
                description="; ".join([description, *notes]),
                steps=pack(
                    requests,
                    token_budget=token_budget,
                    max_requests=max_requests,
                    stretch_tokens=STRETCH_TOKENS,
                ),
            ),
            arrivals={number: request.arrival_seconds for number, request in enumerate(requests)},
            leaves={
                number: request.arrival_seconds + request.output_tokens * DECODE_SECONDS
                for number, request in enumerate(requests)
            },
            stretch_tokens=STRETCH_TOKENS,
            notes=notes,
            left_out=len(self.requests) - len(requests),
            cut=beyond if longer is Longer.CUT else 0,
        )

    def _fitted(self, max_context: int, longer: Longer, beyond: int) -> list[Request]:
        """Return the requests, those beyond the context as ``longer`` says."""
        longest = max(request.total_tokens for request in self.requests)
        found = (
            f"{self.path}: {beyond} of {len(self.requests)} requests are longer than the context of the model, "
            f"{max_context} tokens; the longest has {longest}, cached ones included"
        )
        advice = "--longer cut shortens them, and a model with a longer context holds them"
        if longer is Longer.REFUSE:
            raise HarnessError(f"{found}: --longer skip leaves them out, {advice}")
        if longer is Longer.CUT:
            return [_cut(request, max_context) for request in self.requests]
        if beyond == len(self.requests):
            raise HarnessError(f"{found}: no request is left; {advice}")
        return [request for request in self.requests if request.total_tokens <= max_context]


def _cut(request: Request, max_context: int) -> Request:
    """Return the first ``max_context`` tokens of ``request``, of which at least one is new."""
    prefix = min(request.prefix_tokens, max_context - 1)
    prompt = min(request.prompt_tokens, max_context - prefix)
    return replace(request, prefix_tokens=prefix, prompt_tokens=prompt)


def read_trace(path: Path, progress: Progress | None = None) -> list[Request]:
    """Read a file of requests, in whichever known form it is; returns them in order of arrival.

    Known are the project's own form (``own_trace``), Azure's CSV and Mooncake's JSON lines as they are published; the
    first line tells which it is. Blank lines are skipped, and lines may be in any order: requests that arrive together
    stay in the order of the file. Arrivals count from that of the first request, whatever the clock of the file; none
    may come more than ``MOST_SECONDS`` later.

    Raises HarnessError, with path and line number, saying what was found and what was expected.
    """
    lines = [(n, line) for n, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    told = _tell(lines, f"reading {path.name}", progress or NoProgress())
    try:
        found = list(_reader(lines[0][1])(told)) if lines else []
    except HarnessError as error:
        raise HarnessError(f"{path}, {error}") from error
    if not found:
        raise HarnessError(
            f"{path} is a trace without requests: expected lines such as {own_trace.SHAPE}; or Azure's CSV, or "
            "Mooncake's JSON lines, as they are published"
        )
    begin = min(request.arrival_seconds for _, request in found)
    shifted = []
    for number, request in found:
        since = request.arrival_seconds - begin
        if since > MOST_SECONDS:
            raise HarnessError(
                f"{path}, line {number}: arrival_seconds is {request.arrival_seconds}, {since:g} s after the first "
                f"request of the trace; at most {MOST_SECONDS:g} s are possible"
            )
        shifted.append(replace(request, arrival_seconds=since))
    return sorted(shifted, key=lambda request: request.arrival_seconds)


def _reader(first: str) -> Callable[[Lines], Iterator[tuple[int, Request]]]:
    """Return what reads a file that begins with the line ``first``."""
    if "{" not in first and "," in first:
        return azure_trace.read_azure
    if '"input_length"' in first or '"hash_ids"' in first:
        return mooncake_trace.read_mooncake
    return own_trace.read_own


def _tell(lines: Sequence[tuple[int, str]], what: str, progress: Progress) -> Lines:
    """Yield ``lines``, and tell ``progress`` of them."""
    progress.start(what, len(lines))
    for place, line in enumerate(lines, start=1):
        yield line
        if place % _LINES_AT_A_TIME == 0:
            progress.advance(_LINES_AT_A_TIME)
