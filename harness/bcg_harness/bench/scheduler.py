"""A small scheduler: which requests are prefilled together, under a budget of tokens."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bcg_harness.bench.stretches import cut
from bcg_harness.cases import Step
from bcg_harness.errors import HarnessError
from bcg_harness.selection import MOST_TOKENS

TOKEN_BUDGET = 2048
"""New tokens of a batch, unless something else is asked for."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Describe one request as a server receives it.

    Attributes:
        prompt_tokens: new tokens, at least 1.
        prefix_tokens: tokens before them that are in the KV cache already.
        arrival_seconds: since the start.
        output_tokens: tokens that were generated for it.
    """

    prompt_tokens: int
    prefix_tokens: int = 0
    arrival_seconds: float = 0.0
    output_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise HarnessError(f"prompt_tokens is {self.prompt_tokens}, expected at least 1")
        if self.prefix_tokens < 0:
            raise HarnessError(f"prefix_tokens is {self.prefix_tokens}, expected at least 0")
        if not 0 <= self.output_tokens <= MOST_TOKENS:
            raise HarnessError(
                f"output_tokens is {self.output_tokens}, expected at least 0 and at most {MOST_TOKENS}"
            )
        if self.total_tokens > MOST_TOKENS:
            raise HarnessError(
                f"{self.prompt_tokens} new and {self.prefix_tokens} cached tokens are too long a request: "
                f"at most {MOST_TOKENS} together are possible"
            )
        # Written so that NaN and integers that no float can hold are refused too.
        if not 0 <= self.arrival_seconds <= sys.float_info.max:
            raise HarnessError(
                f"arrival_seconds is {self.arrival_seconds}, expected seconds since the start: a finite number, at "
                "least 0"
            )

    @property
    def total_tokens(self) -> int:
        """Return cached and new tokens."""
        return self.prefix_tokens + self.prompt_tokens


def pack(
    requests: Sequence[Request],
    *,
    token_budget: int,
    max_requests: int,
    max_wait: float = 0.02,
    stretch_tokens: int | None = None,
) -> tuple[Step, ...]:
    """Return the batches in which ``requests`` are prefilled; a sequence number is a place in ``requests``.

    First come steps that are not checked and put prefixes into the KV cache. Then requests are served in order of
    arrival. A batch closes when it is full, or when the next request arrives more than ``max_wait`` seconds after the
    first of the batch. A prompt that does not fit fills the rest of the batch and goes on in the next. With
    ``stretch_tokens`` the prefixes come stretch by stretch, so that pages can change hands between them.

    Batches do not depend on how long they take: every execution mode gets the same ones, so that times can be compared.
    A real server would put what arrives during a slow batch into the next one.

    Args:
        requests: in order of arrival.
        token_budget: most new tokens of a batch.
        max_requests: most requests of a batch.
        max_wait: seconds that the first request of a batch waits for others.
        stretch_tokens: tokens of a stretch, as in ``stretches.cut``; None leaves all in one.

    Raises:
        HarnessError: for budgets below 1, a negative wait, or requests that are out of order.
    """
    if token_budget < 1 or max_requests < 1:
        raise HarnessError(
            f"a batch of at most {token_budget} tokens and {max_requests} requests can serve nothing: "
            "both have to be at least 1"
        )
    if not max_wait >= 0:
        raise HarnessError(f"max_wait is {max_wait}, expected seconds: at least 0")
    arrivals = [request.arrival_seconds for request in requests]
    if any(later < earlier for earlier, later in pairwise(arrivals)):
        raise HarnessError("requests are out of order: sort them by arrival_seconds")
    scheduler = _Scheduler(token_budget, max_requests, max_wait)
    prompts = ((i, r.prompt_tokens, r.arrival_seconds) for i, r in enumerate(requests))
    timed = [Step(requests=batch) for batch in scheduler.batches(prompts)]
    cached = {i: request.prefix_tokens for i, request in enumerate(requests)}
    steps: list[Step] = []
    for stretch in [timed] if stretch_tokens is None else cut(timed, stretch_tokens, cached=cached):
        own = dict.fromkeys(sequence for step in stretch for sequence, _ in step.requests)
        prefixes = ((sequence, cached[sequence], 0.0) for sequence in own)
        steps += [Step(requests=batch, checked=False) for batch in scheduler.batches(prefixes)]
        steps += stretch
    return tuple(steps)


@dataclass(frozen=True)
class _Scheduler:
    token_budget: int
    max_requests: int
    max_wait: float

    def batches(
        self, queue: Iterable[tuple[int, int, float]]
    ) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield batches of (sequence, tokens) for a queue of (sequence, tokens, arrival)."""
        batch: list[tuple[int, int]] = []
        room, opened = self.token_budget, 0.0
        for sequence, tokens, arrival in queue:
            left = tokens
            while left:
                full = not room or len(batch) == self.max_requests
                if batch and (full or arrival - opened > self.max_wait):
                    yield tuple(batch)
                    batch, room = [], self.token_budget
                if not batch:
                    opened = arrival
                chunk = min(left, room)
                batch.append((sequence, chunk))
                room -= chunk
                left -= chunk
        if batch:
            yield tuple(batch)
