"""What every execution mode has in common: how it is made ready, what it refuses, and one call that runs a batch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    TokenBuckets,
)
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.probe import idle_backend
from bcg_llama import LlamaModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Ground:
    """Hold what all modes of a run share.

    Attributes:
        model: its weights are shared; on CUDA its element-wise functions are fused.
        plain: the same weights with element-wise functions as they are; ``model`` itself on a CPU.
        kv_cache: holds prefixes.
        buckets: token counts to capture.
        max_requests: most requests of a batch.
        needed: the buckets that the workloads go to, for modes that take long to record one; None for all.
    """

    model: LlamaModel
    plain: LlamaModel
    kv_cache: PagedKVCache
    buckets: TokenBuckets
    max_requests: int
    needed: TokenBuckets | None = None

    @property
    def device(self) -> torch.device:
        """Return where everything lives."""
        return self.model.spec.device

    @cached_property
    def runner(self) -> PrefillRunner:
        """Return the one runner of ``model``, made at first use; it captures nothing by itself."""
        return self.new_runner(self.model)

    @cached_property
    def plain_runner(self) -> PrefillRunner:
        """Return the one runner of ``plain``, which is ``runner`` where both models are one."""
        return self.runner if self.plain is self.model else self.new_runner(self.plain)

    def new_runner(self, model: LlamaModel, *, full_graph: bool = False) -> PrefillRunner:
        """Return a runner of ``model`` over the shared cache, with a backend that only stands in."""
        spec = AttentionSpec.of(model.spec, page_size=self.kv_cache.page_size)
        return PrefillRunner(
            model,
            self.kv_cache,
            idle_backend(spec),
            buckets=self.buckets,
            max_requests=self.max_requests,
            full_graph=full_graph,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefilled:
    """Hold what a mode computed for one batch; valid until the mode's next call.

    Shape letters: R real tokens, B requests, D model dim, V vocabulary.

    Attributes:
        logits_BV: of each request's last token.
        next_tokens_B: int64, the most likely token of each request, on the device.
        hidden_RD: normalised hidden states of all new tokens; None where a mode does not keep them.
        padded_tokens: rows that were computed for the new tokens.
        served_by: "bucket T" for a replay, why there was none in a mode that replays, otherwise what ran.
    """

    logits_BV: Tensor
    next_tokens_B: Tensor
    hidden_RD: Tensor | None
    padded_tokens: int
    served_by: str


class ExecutionMode(ABC):
    """Run prefill in one way. Made once a run, readied for one backend at a time.

    ``prefill`` queues everything on the current stream, fills the batch's KV slots, marks its tokens as cached in the
    batch's sequences, and does not synchronise (as far as what it stands for allows). A mode with attention of its own
    keeps keys and values itself, and leaves the KV slots alone.

    Args:
        ground: what all modes share.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``bcg bench --help`` and reports."""
    own_attention: ClassVar[bool] = False
    """True for a mode that has attention of its own and runs once for all backends."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Say what is missing to run this mode at all, with a hint that helps; None when nothing is."""
        return None

    def unsupported(self, backend: AttentionBackend) -> str | None:
        """Say why this mode cannot work with ``backend``; None when it can."""
        return None

    @abstractmethod
    def prepare(self, backend: AttentionBackend, label: str) -> ModeSetup:
        """Get ready for ``backend``, called ``label`` in the result: compile, warm up, capture. Errors are raised.

        Called again with each backend; what does not depend on the backend is kept from the first.
        """

    def refuses(self, batch: PrefillBatch) -> str | None:
        """Say why ``batch`` cannot be served; None when it can."""
        return None

    def stage(self, batch: PrefillBatch) -> None:
        """Bring into place what this mode reads besides the batch and the shared cache; never timed."""
        return

    @abstractmethod
    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run the new tokens of ``batch``."""

    def notes(self) -> list[str]:
        """Return what a report should say of this mode as it was prepared, a line each."""
        return []
