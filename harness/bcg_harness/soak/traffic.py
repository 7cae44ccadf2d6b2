"""What is served: random batches of requests that begin, go on behind their cached tokens, and end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from bcg_harness.cases import Case, Step
from bcg_harness.fuzz.draw import Bounds, draw_requests


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Hold one batch, and what happens after it.

    Attributes:
        step: the batch.
        ended: sequences that are released behind it.
    """

    step: Step
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Draw what a server may see; round i of a seed is the same in runs of any length.

    Attributes:
        seed: of everything that is drawn.
        buckets: what is captured; edges are drawn most of all.
        bounds: of requests and their lengths.
    """

    seed: int
    buckets: Sequence[int]
    bounds: Bounds

    @classmethod
    def of(cls, seed: int, buckets: Sequence[int], max_positions: int) -> "Traffic":
        """Bound the traffic by what is captured: contexts of up to two of the largest bucket, in few requests."""
        context = min(2 * max(buckets), max_positions)
        return cls(seed=seed, buckets=buckets, bounds=Bounds(most_context=context))

    @property
    def alive(self) -> int:
        """Return how many sequences are alive at most."""
        return self.bounds.most_requests + 4

    @property
    def largest(self) -> Case:
        """Return a case that needs as many pages and requests as anything that is drawn."""
        requests = tuple((sequence, self.bounds.most_context) for sequence in range(self.alive))
        return Case(name="soak", description="sizes the KV cache", steps=(Step(requests=requests),))

    @property
    def pulse(self) -> tuple[Visit, ...]:
        """Return small batches to serve whenever memory is read, as backends may keep what they made for the last ones.

        A backend may have a kernel for cached prefixes and one for none, and plan ahead in turns: so each comes twice.
        """
        tokens = min(self.buckets[0], max(1, self.bounds.most_context // 2))
        return tuple(
            Visit(step=Step(requests=((sequence, tokens),)), ended=(sequence,) if ends else ())
            for ends in (False, True)
            for sequence in (0, 1)
        )

    def extremes(self) -> Iterator[Visit]:
        """Yield the largest batches there are, so that memory that grows with a batch has grown once they are served.

        These are checked: the most new tokens behind the longest prefixes, in a bucket and above all buckets, and the
        most in one request. Others make the prefixes.
        """
        largest, context = self.buckets[-1], self.bounds.most_context
        count = self.bounds.most_requests
        for total in (largest, largest + max(1, largest // 4)):
            shares = [total // count + (place < total % count) for place in range(count)]
            requests = [
                (sequence, min(share, context - 1))
                for sequence, share in enumerate(shares)
                if share
            ]
            for sequence, share in requests:
                for done in range(0, context - share, largest):
                    tokens = min(largest, context - share - done)
                    yield Visit(step=Step(requests=((sequence, tokens),), checked=False))
            step = Step(requests=tuple(requests))
            yield Visit(step=step, ended=tuple(sequence for sequence, _ in requests))
        yield Visit(step=Step(requests=((0, min(largest, context)),)), ended=(0,))

    def round(self, number: int) -> Iterator[Visit]:
        """Yield batches without end, beginning with no sequence alive.

        A sequence number never comes again after its end: other tokens then lie in the pages that it gave back.
        """
        # Of text, so that neighbouring seeds and numbers have nothing in common.
        random = Random(f"round {number} of seed {self.seed}")
        names = list(range(self.alive))
        lengths: dict[int, int] = {}
        while True:
            drawn = draw_requests(random, self.alive, lengths, self.buckets, self.bounds)
            for place, tokens in drawn:
                lengths[place] = lengths.get(place, 0) + tokens
            requests = tuple((names[place], tokens) for place, tokens in drawn)
            ended = [place for place in lengths if self._ends(random, lengths[place])]
            yield Visit(step=Step(requests=requests), ended=tuple(names[place] for place in ended))
            for place in ended:
                names[place] = max(names) + 1
                del lengths[place]

    def _ends(self, random: Random, length: int) -> bool:
        """Tell whether a sequence ends: any may, and a long one would find no room for its next tokens."""
        return random.random() < 0.1 or length > 0.75 * self.bounds.most_context
