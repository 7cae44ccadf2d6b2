"""Stretches of a workload: pieces that share no request, so that pages can change hands between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bcg_harness.cases import Step, lengths_of


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Hold a piece of a workload that shares no request with the others, and is measured by itself.

    Attributes:
        steps: its batches.
        ended: sequences of earlier stretches whose pages come back before it.
    """

    steps: tuple[Step, ...]
    ended: tuple[int, ...] = ()

    @property
    def lengths(self) -> dict[int, int]:
        """Return the tokens of each of its sequences at its end, prefix included."""
        return lengths_of(self.steps)


def cut(
    steps: Sequence[Step], least: int, *, cached: Mapping[int, int] | None = None
) -> Iterator[tuple[Step, ...]]:
    """Yield ``steps`` in pieces, in order; each sequence has all its steps in one of them.

    A piece ends as soon as it has ``least`` tokens and no request goes on behind it; the last may be smaller.

    Args:
        steps: of a workload.
        least: tokens of a piece, cached ones included.
        cached: tokens by sequence that are in no step, and count with the first step of the sequence.
    """
    before = dict(cached or {})
    last = {sequence: place for place, step in enumerate(steps) for sequence, _ in step.requests}
    begin, tokens, goes_on = 0, 0, 0
    for place, step in enumerate(steps):
        tokens += step.num_tokens
        for sequence, _ in step.requests:
            tokens += before.pop(sequence, 0)
            goes_on = max(goes_on, last[sequence])
        if tokens >= least and goes_on <= place:
            yield tuple(steps[begin : place + 1])
            begin, tokens = place + 1, 0
    if begin < len(steps):
        yield tuple(steps[begin:])
