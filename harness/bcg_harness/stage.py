"""A runner with everything around it that a check needs: a fragmented KV cache, poison, and counters.

Shape letters: T padded tokens, R real tokens, B requests, D model dim, V vocabulary, M rows of the attention output,
X a fused row of heads.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bcg_core import (
    Admission,
    AttentionSpec,
    CaptureReport,
    Chunk,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillModel,
    PrefillRunner,
    SegmentEngine,
    TokenBuckets,
)
from bcg_core.debug import poison
from bcg_harness.cases import Case, Step
from bcg_harness.counting_model import CountingModel
from bcg_harness.probe import Probe, Trace, idle_backend
from bcg_harness.tokens import TokenSource

_LEAST_MAX_REQUESTS = 256
"""Requests that backends are made for: as a server says, more than there are, so that no batch fills a workspace."""

_SPARE_PAGES = 4
"""Pages beyond those of the largest case, of which the bystander holds one."""

_GUARD_ROWS = 128
"""As many as the rows of a tile, which is what kernels write at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Arm:
    """Hold what one forward of a batch in one mode did.

    Attributes:
        hidden_TD: hidden states of all rows, padded ones included.
        hidden_RD: those of the real rows, as the runner returned them.
        logits_BV: as the runner returned them.
        admission: as the runner returned it.
        trace: what the backend was asked for.
        model_forwards: how often the model's Python ran.
        replays: replays counted, by bucket.
        fallbacks: fallbacks counted, by reason.
        out_MX: attention output buffer of the runner, with rows beyond T and those that guard its end.
        padded_inputs: token ids, positions and slots of the padded rows, ``[3, T - R]``; empty without any.
    """

    hidden_TD: Tensor
    hidden_RD: Tensor
    logits_BV: Tensor
    admission: Admission
    trace: Trace
    model_forwards: int
    replays: Counter[int]
    fallbacks: Counter[str]
    out_MX: Tensor
    padded_inputs: Tensor


class Stage:
    """Run batches through one runner, each from the same poisoned start.

    Args:
        model: what to run.
        cases: give the size of the KV cache.
        buckets: token counts to capture.
        page_size: tokens a KV page.
        runner_type: class of the runner; tests put faulty ones here.
        engine: records the segments; default is the one for the model's device.
    """

    def __init__(
        self,
        model: PrefillModel,
        cases: Iterable[Case],
        buckets: TokenBuckets,
        *,
        page_size: int = 16,
        runner_type: Callable[..., PrefillRunner] = PrefillRunner,
        engine: SegmentEngine | None = None,
    ) -> None:
        cases = list(cases)
        pages = max(
            (sum(-(-n // page_size) for n in case.lengths.values()) for case in cases), default=0
        )
        # Page 0 is the cache's own.
        self.kv_cache = PagedKVCache(
            model.spec, num_pages=1 + pages + _SPARE_PAGES, page_size=page_size
        )
        self.model = CountingModel(model)
        self.spec = AttentionSpec.of(model.spec, page_size=page_size)
        self.runner = runner_type(
            self.model,
            self.kv_cache,
            idle_backend(self.spec),
            buckets=buckets,
            max_requests=max(
                [
                    _LEAST_MAX_REQUESTS,
                    *(len(step.requests) for case in cases for step in case.steps),
                ]
            ),
            engine=engine,
        )
        self._guarded_MX = self._guard_output()
        self._sequences: dict[int, KVSequence] = {}
        self._bystander = KVSequence()

    def _guard_output(self) -> Tensor:
        """Give the attention output a buffer that goes on behind its end, and return all of it.

        There a backend's write beyond the last row of the largest bucket shows, which would hit memory of others.
        """
        boundary = self.runner.workspace.boundary
        rows, width = boundary.out_MX.shape
        guarded_MX = boundary.out_MX.new_full((rows + _GUARD_ROWS, width), float("nan"))
        boundary.out_MX = guarded_MX[:rows].zero_()
        return guarded_MX

    def capture(self, progress: Callable[[int, int], None] | None = None) -> CaptureReport:
        """Capture all buckets; no backend is involved."""
        return self.runner.capture(progress)

    def use(self, probe: Probe) -> Probe:
        """Switch to the backend in ``probe``, and return it; captured segments stay as they are."""
        self.runner.use_backend(probe)
        return probe

    def reset(self, seed: int, *, nan: bool = False) -> None:
        """Give all pages back, shuffle the free ones, and fill the cache with garbage.

        As in a server that has run for a while: page tables are not contiguous, and slots that nobody has written yet
        hold what an earlier request left there: finite garbage. For a backend that claims to stand NaN, every second
        element is NaN; the others are not, as arithmetic in place does not change the bits of NaN.
        """
        for sequence in (*self._sequences.values(), self._bystander):
            self.kv_cache.free(sequence)
        self._sequences = {}
        singles = [KVSequence() for _ in range(self.kv_cache.free_pages)]
        for single in singles:
            self.kv_cache.extend(single, 1)
        singles.sort(key=lambda single: single.pages)
        random.Random(seed).shuffle(singles)
        for single in singles:
            self.kv_cache.free(single)
        self.kv_cache.extend(self._bystander, 1)
        generator = torch.Generator(self.kv_cache.device).manual_seed(seed)
        storage = self.kv_cache.storage_L2PSKH
        storage.normal_(generator=generator)
        if nan:
            storage[..., ::2] = float("nan")

    def batch(self, step: Step, source: TokenSource) -> PrefillBatch:
        """Make the batch of ``step``: each sequence goes on where it stands.

        What the pages hold is the stage's doing, and several runs begin from it: no run is to clear anything.
        """
        self.kv_cache.holders.unclean.clear()
        chunks = []
        for number, count in step.requests:
            sequence = self._sequences.setdefault(number, KVSequence())
            stop = sequence.cached + count
            token_ids = source.tokens(number, stop)[sequence.cached :]
            chunks.append(Chunk(token_ids=token_ids, sequence=sequence))
        return PrefillBatch.from_chunks(chunks, self.kv_cache)

    def release(self, sequence: int) -> None:
        """Give the pages of ``sequence`` back; when it comes again, it begins anew."""
        self.kv_cache.free(self._sequences.pop(sequence))

    def spoil(self, batch: PrefillBatch) -> None:
        """Fill the slots that ``batch`` is to write with NaN.

        Behind ``release`` they may hold what the same tokens left there, and a write that is missing would not show.
        """
        slots = batch.slot_mapping_R.to(self.kv_cache.device)
        self.kv_cache.storage_L2PSKH.flatten(2, 3)[:, :, slots] = float("nan")

    def expected_bucket(self, batch: PrefillBatch) -> int | None:
        """Return the bucket that should serve ``batch``, found independently of the runner."""
        fitting = [size for size in self.runner.buckets if size >= batch.num_tokens > 0]
        return min(fitting, default=None)

    def run(
        self,
        batch: PrefillBatch,
        mode: Mode,
        probe: Probe,
        *,
        judge: bool = False,
        delay: bool = False,
    ) -> Arm:
        """Run ``batch`` on poisoned memory; ``judge`` and ``delay`` are for the trace of ``probe``."""
        bucket = None if mode is Mode.EAGER else self.expected_bucket(batch)
        padded = batch.num_tokens if bucket is None else bucket
        self._poison(padded)
        probe.trace = Trace(judges=judge, delays=delay)
        stats = self.runner.stats
        replays, fallbacks = stats.replays.copy(), stats.fallbacks.copy()
        forwards = self.model.forwards
        result = self.runner.prefill(batch, mode=mode)
        hidden_TD = result.hidden_RD
        padded_inputs = torch.empty(3, 0, dtype=torch.int64)
        if padded > batch.num_tokens:
            hidden_TD = self.runner.workspace.hidden_MD[:padded]
            packed = self.runner.workspace.inputs(padded).packed.view(3, padded)
            padded_inputs = packed[:, batch.num_tokens :].clone()
        return Arm(
            hidden_TD=hidden_TD.clone(),
            hidden_RD=result.hidden_RD.clone(),
            logits_BV=result.logits_BV,
            admission=result.admission,
            trace=probe.trace,
            model_forwards=self.model.forwards - forwards,
            replays=stats.replays - replays,
            fallbacks=stats.fallbacks - fallbacks,
            out_MX=self._guarded_MX.clone(),
            padded_inputs=padded_inputs,
        )

    def _poison(self, padded: int) -> None:
        """Poison the workspace, with the slots of a page that no request of the batch owns."""
        self._guarded_MX.fill_(float("nan"))
        page, page_size = self._bystander.pages[0], self.kv_cache.page_size
        poison(self.runner.workspace, self.model.spec, padded, page=page, page_size=page_size)
