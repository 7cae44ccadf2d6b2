"""The batches of a workload, made anew for every mode and round from token ids in host memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from bcg_core import Chunk, KVSequence, PagedKVCache, PrefillBatch
from bcg_harness.bench.stretches import Stretch
from bcg_harness.bench.workloads import Workload
from bcg_harness.tokens import TokenSource


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Hold what one request brings to a batch.

    Attributes:
        sequence: its pages.
        prefix: tokens before the new ones.
        token_ids: the new ones.
    """

    sequence: KVSequence
    prefix: int
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """Hold the requests of one step of a workload.

    Attributes:
        requests: in batch order.
        kv_cache: holds their pages.
        timed: False for a step that only fills the cache.
    """

    requests: tuple[Request, ...]
    kv_cache: PagedKVCache
    timed: bool

    def batch(self) -> PrefillBatch:
        """Return the batch of this step, as if it were about to be run for the first time."""
        for request in self.requests:
            self.kv_cache.extend(request.sequence, request.prefix)
            self.kv_cache.mark_written(request.sequence, request.prefix)
        return PrefillBatch.from_chunks(
            [
                Chunk(token_ids=request.token_ids, sequence=request.sequence)
                for request in self.requests
            ],
            self.kv_cache,
        )


class Arena:
    """Give one workload at a time its pages, and its steps as scenes, stretch by stretch.

    Pages stay with their sequence in its stretch, so every mode and round reads and writes the same slots there.

    Args:
        kv_cache: shared by all modes.
        source: gives the token ids.
    """

    def __init__(self, kv_cache: PagedKVCache, source: TokenSource) -> None:
        self._kv_cache = kv_cache
        self._source = source
        self._sequences: dict[int, KVSequence] = {}

    def enter(self, workload: Workload) -> Iterator[list[Scene]]:
        """Leave what was entered, and yield the scenes of each stretch of ``workload``.

        The cache holds none of its tokens then, and what was yielded before must not be used again: sequences that have
        ended by then give their pages back.
        """
        self.leave()
        for stretch in workload.stretches:
            for ended in stretch.ended:
                self._kv_cache.free(self._sequences.pop(ended))
            yield self._scenes(stretch)

    def leave(self) -> None:
        """Take all pages back; scenes that were entered must not be used again."""
        for sequence in self._sequences.values():
            self._kv_cache.free(sequence)
        self._sequences = {}

    def _scenes(self, stretch: Stretch) -> list[Scene]:
        lengths = stretch.lengths
        self._sequences |= {number: KVSequence() for number in lengths}
        tokens = {number: self._source.tokens(number, length) for number, length in lengths.items()}
        reached = dict.fromkeys(lengths, 0)
        scenes = []
        for step in stretch.steps:
            requests = []
            for number, count in step.requests:
                start = reached[number]
                reached[number] = stop = start + count
                requests.append(
                    Request(
                        sequence=self._sequences[number],
                        prefix=start,
                        token_ids=tokens[number][start:stop],
                    )
                )
            scenes.append(
                Scene(requests=tuple(requests), kv_cache=self._kv_cache, timed=step.checked)
            )
        return scenes
