"""Run an execution mode beside eager prefill with SDPA, batch by batch.

Shape letters: R new tokens of a batch, B requests, D model dim, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from bcg_core import (
    AttentionBackend,
    BackendRegistry,
    Chunk,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    TokenBuckets,
)
from bcg_harness.bench.mode import ExecutionMode, Ground, Prefilled
from bcg_harness.tokens import RandomTokens
from bcg_llama import LlamaModel


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialStep:
    """Hold what a mode made of a batch, and what eager prefill made of it.

    Attributes:
        result: of the mode; its tensors are copies.
        hidden_RD: what its hidden states should be.
        logits_BV: what its logits should be.
        kv_written: the whole KV cache afterwards.
        kv_expected: what it should be.
        cached: tokens that each sequence of the batch counts as cached afterwards.
    """

    result: Prefilled
    hidden_RD: Tensor
    logits_BV: Tensor
    kv_written: Tensor
    kv_expected: Tensor
    cached: tuple[int, ...]


class ModeTrial:
    """Give a mode batch after batch, on sequences that go on where they stand.

    Args:
        model: what to run.
        make_mode: makes the mode.
        buckets: token counts to capture.
        padded: run the reference at the padded shape of its bucket, for modes that must be bit-equal to it.

    Attributes:
        ground: of the mode.
        mode: under test, prepared.
        setup: what ``prepare`` returned.
        backend: that the mode was prepared for.
    """

    def __init__(
        self,
        model: LlamaModel,
        make_mode: Callable[[Ground], ExecutionMode],
        *,
        buckets: tuple[int, ...] = (16, 64),
        padded: bool = False,
    ) -> None:
        self.ground = Ground(
            model=model,
            plain=model,
            kv_cache=PagedKVCache(model.spec, num_pages=64, page_size=16),
            buckets=TokenBuckets(buckets),
            max_requests=8,
        )
        self._reference = self.ground.new_runner(model)
        self._how = Mode.PADDED_EAGER if padded else Mode.EAGER
        self._reference.use_backend(self.make_backend())
        self._tokens = RandomTokens(model.spec.vocab_size)
        self._sequences: dict[int, KVSequence] = {}
        self.backend = self.make_backend()
        self.mode = make_mode(self.ground)
        self.setup = self.mode.prepare(self.backend, "sdpa")

    def make_backend(self) -> AttentionBackend:
        """Return a new SDPA backend."""
        runner = self._reference
        return BackendRegistry().create(
            "sdpa", runner.backend.spec, runner.limits, self.ground.device
        )

    def batch(self, *requests: tuple[int, int]) -> PrefillBatch:
        """Return the batch of the next tokens of ``requests``, each a sequence number and a count."""
        chunks = []
        for number, count in requests:
            sequence = self._sequences.setdefault(number, KVSequence())
            ids = self._tokens.tokens(number, sequence.cached + count)[sequence.cached :]
            chunks.append(Chunk(token_ids=ids, sequence=sequence))
        return PrefillBatch.from_chunks(chunks, self.ground.kv_cache)

    def step(self, *requests: tuple[int, int]) -> TrialStep:
        """Prefill the next tokens of ``requests`` eagerly and in the mode.

        The mode finds the cache as its own earlier steps left it, or as the reference did where it does not write it.
        """
        batch, storage = self.batch(*requests), self.ground.kv_cache.storage_L2PSKH
        before = storage.clone()
        expected = self._reference.prefill(batch, mode=self._how)
        hidden_RD, logits_BV = expected.hidden_RD.clone(), expected.logits_BV.clone()
        kv_expected = storage.clone()
        if not self.mode.own_attention:
            storage.copy_(before)
        for sequence, prefix in zip(batch.sequences, batch.prefix_lens, strict=True):
            sequence.cached = prefix
        self.mode.stage(batch)
        result = self.mode.prefill(batch)
        return TrialStep(
            result=replace(
                result,
                logits_BV=result.logits_BV.clone(),
                hidden_RD=None if result.hidden_RD is None else result.hidden_RD.clone(),
            ),
            hidden_RD=hidden_RD,
            logits_BV=logits_BV,
            kv_written=storage.clone(),
            kv_expected=kv_expected,
            cached=tuple(sequence.cached for sequence in batch.sequences),
        )
