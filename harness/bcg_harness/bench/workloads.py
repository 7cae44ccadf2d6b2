"""Workloads: batches whose prefill is timed, with the moments at which their requests arrive."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bcg_harness.bench.stretches import Stretch, cut
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.cases import Case, Step, lengths_of
from bcg_harness.errors import HarnessError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Describe prefills that are timed, one batch after the other.

    Checked steps of the case are timed; the others only fill the KV cache, off the clock.

    Attributes:
        case: the batches.
        arrivals: seconds since the start at which sequences arrive; 0 for those that are left out.
        leaves: seconds since the start until which sequences hold their pages; those that are left out hold them until
            the end of their stretch.
        stretch_tokens: tokens of a stretch, as in ``stretches.cut``; None for a single one.
        notes: what a reader of the figures should know, a line each.
        left_out: requests that are in no batch, as they are longer than the context.
        cut: requests that were cut to the context.
    """

    case: Case
    arrivals: Mapping[int, float] = field(default_factory=dict)
    leaves: Mapping[int, float] = field(default_factory=dict)
    stretch_tokens: int | None = None
    notes: tuple[str, ...] = ()
    left_out: int = 0
    cut: int = 0

    @property
    def name(self) -> str:
        """Return the name, for tables and ``--workload``."""
        return self.case.name

    @property
    def description(self) -> str:
        """Return what this is, in words."""
        return self.case.description

    @property
    def timed_steps(self) -> tuple[Step, ...]:
        """Return the batches that are timed, in order."""
        return tuple(step for step in self.case.steps if step.checked)

    @property
    def requests_per_step(self) -> tuple[int, ...]:
        """Return B of each timed batch."""
        return tuple(len(step.requests) for step in self.timed_steps)

    @property
    def max_requests(self) -> int:
        """Return the most requests of a batch, timed or not."""
        return max(len(step.requests) for step in self.case.steps)

    @property
    def lengths(self) -> Mapping[int, int]:
        """Return the tokens of each sequence at the end, prefix included."""
        return self.case.lengths

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence at the end: the context that a model needs."""
        return max(self.lengths.values(), default=0)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """Return the pieces that are measured one after the other, each by itself."""
        if self.stretch_tokens is None:
            return (Stretch(steps=self.case.steps),)
        found: list[Stretch] = []
        held: list[int] = []
        for steps in cut(self.case.steps, self.stretch_tokens):
            own = lengths_of(steps)
            begins = min((self.arrivals.get(sequence, 0.0) for sequence in own), default=0.0)
            ended = tuple(each for each in held if self.leaves.get(each, 0.0) <= begins)
            found.append(Stretch(steps=steps, ended=ended))
            gone = set(ended)
            held = [*(each for each in held if each not in gone), *own]
        return tuple(found)

    def kv_pages(self, page_size: int) -> int:
        """Return the most pages of ``page_size`` tokens that are held at once."""
        lengths = self.lengths
        held, most = 0, 0
        for stretch in self.stretches:
            held -= sum(-(-lengths[sequence] // page_size) for sequence in stretch.ended)
            held += sum(-(-length // page_size) for length in stretch.lengths.values())
            most = max(most, held)
        return most

    def batch_tokens(self) -> tuple[int, ...]:
        """Return R of each timed batch: the distribution that a bucket ladder has to serve."""
        return tuple(step.num_tokens for step in self.timed_steps)

    def record(self) -> WorkloadRecord:
        """Return what a report says of this workload."""
        cached: dict[int, int] = {}
        steps = []
        for step in self.case.steps:
            if step.checked:
                steps.append(tuple((cached.get(seq, 0), new) for seq, new in step.requests))
            for sequence, new in step.requests:
                cached[sequence] = cached.get(sequence, 0) + new
        return WorkloadRecord(
            name=self.name,
            description=self.description,
            steps=tuple(steps),
            left_out=self.left_out,
            cut=self.cut,
        )

    def time_to_first_token(self, step_latencies: Sequence[float]) -> dict[int, float]:
        """Return how long each sequence waits from its arrival to its first token, queueing included.

        A batch starts when the one before has ended and all of its requests have arrived. The first token of a request
        is there when the batch with its last chunk ends.

        Args:
            step_latencies: seconds that each timed batch takes; as many as there are timed batches.
        """
        now = 0.0
        ends: dict[int, float] = {}
        for step, seconds in zip(self.timed_steps, step_latencies, strict=True):
            arrivals = (self.arrivals.get(sequence, 0.0) for sequence, _ in step.requests)
            now = max(now, *arrivals, 0.0) + seconds
            ends.update((sequence, now) for sequence, _ in step.requests)
        return {sequence: end - self.arrivals.get(sequence, 0.0) for sequence, end in ends.items()}


def check_fits(workload: Workload, max_context: int) -> None:
    """Raise HarnessError when ``workload`` has a sequence that is longer than a model's context."""
    if workload.longest > max_context:
        lengths = workload.lengths
        sequence = max(lengths, key=lambda number: lengths[number])
        raise HarnessError(
            f"workload {workload.name!r} has a request of {workload.longest} tokens, cached ones included (request "
            f"{sequence}), but the context of the model ends at {max_context}: choose a workload with shorter "
            "requests, or a model with a longer context"
        )
