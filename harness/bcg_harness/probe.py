"""A transparent backend around the one under test: counts the calls, and judges each layer when asked to.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    Capabilities,
    Metadata,
    PagedKVCache,
    PrefillBatch,
)
from bcg_core.debug import synchronisation
from bcg_harness.budgets import Measured, bit_equal
from bcg_harness.delegating import DelegatingBackend
from bcg_harness.oracle import cached_slots, cached_tokens, measure_attention

_DELAY_CYCLES = 2_000_000
"""Clock cycles that a delay keeps the GPU busy: about 1 ms, while the host gets to the first layer."""

_INPUTS = ("q", "k", "v", "the cached keys", "the cached values")
"""What a backend is given, and leaves as it is."""


@dataclass(kw_only=True)
class Trace:
    """Record what a backend was asked for during one forward.

    Attributes:
        judges: compare every layer with the oracle, which costs time.
        delays: keep the GPU busy once before the first layer, so that whoever does not wait for its inputs reads what
            was there before them.
        slots: where the cache holds each request's tokens; filled when it judges.
        batches: what metadata was prepared for, once each time.
        layers: the layers attended to, in order.
        rows: how many rows each of them had.
        measured: errors of each layer and request.
        elsewhere: the layers whose result was not in ``out``, although the backend declares that it writes there.
        changed: (layer, name) of each of q, k, v and the batch's keys and values in the cache that the backend changed;
            filled when it judges.
        missing: (layer, name) of keys and values that were not in the cache; filled when it judges.
    """

    judges: bool = False
    delays: bool = False
    slots: list[Tensor] = field(default_factory=list)
    batches: list[PrefillBatch] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    elsewhere: list[int] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    changed: list[tuple[int, str]] = field(default_factory=list)
    missing: list[tuple[int, str]] = field(default_factory=list)


class Probe(DelegatingBackend):
    """Delegate everything to ``inner`` and write down what happens in ``trace``, which the harness replaces."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner)
        self.trace = Trace()

    def init_forward_metadata(self, batch: PrefillBatch) -> Metadata:
        """Delegate, and write down the batch."""
        self.trace.batches.append(batch)
        metadata = super().init_forward_metadata(batch)
        self._delay(batch)
        return metadata

    def update_bucket_metadata(self, metadata: Metadata | None, batch: PrefillBatch) -> Metadata:
        """Delegate, and write down the batch."""
        self.trace.batches.append(batch)
        updated = super().update_bucket_metadata(metadata, batch)
        self._delay(batch)
        return updated

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Metadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Delegate; compare inputs with the cache and the result with the oracle when the trace judges."""
        trace = self.trace
        trace.layers.append(layer)
        trace.rows.append(q_RNH.shape[0])
        if not trace.judges:
            result = super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
            if out_RNH is not None and not _is_same_memory(result, out_RNH):
                trace.elsewhere.append(layer)
            return result
        batch = trace.batches[-1]
        given = q_RNH.clone(), k_RKH.clone(), v_RKH.clone()
        # Judging waits for the device, whatever a debug tool forbids the backend.
        with synchronisation("default"):
            trace.slots = trace.slots or cached_slots(batch)
            new_R = batch.slot_mapping_R.to(kv_cache.device)
            keys, values = kv_cache.flat(layer)
            cached = cached_tokens(kv_cache, layer, trace.slots)
            before = *given, keys[new_R], values[new_R]
            for name, new, there in zip(("keys", "values"), before[1:3], before[3:], strict=True):
                # How many rows there are, `structure` judges.
                if not bit_equal(there, new[: len(new_R)]):
                    trace.missing.append((layer, name))
        result = super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
        with synchronisation("default"):
            after = q_RNH, k_RKH, v_RKH, keys[new_R], values[new_R]
            for name, then, now in zip(_INPUTS, before, after, strict=True):
                if not bit_equal(then, now):
                    trace.changed.append((layer, name))
            trace.measured += measure_attention(
                result, given[0], batch, cached, layer, scale=self.spec.scale
            )
        return result

    def _delay(self, batch: PrefillBatch) -> None:
        """Hold up what is queued from here on: the first segment, and with it the queries of the first layer."""
        if self.trace.delays and batch.device.type == "cuda":
            torch.cuda._sleep(_DELAY_CYCLES)


def _is_same_memory(result: object, out_RNH: Tensor) -> bool:
    """Tell whether ``result`` is ``out_RNH``, or a view of all of it: the core copies nothing then."""
    if result is out_RNH:
        return True
    if not isinstance(result, Tensor):
        return False
    return result.data_ptr() == out_RNH.data_ptr() and result.stride() == out_RNH.stride()


class IdleBackend(AttentionBackend):
    """Attend to nothing: the backend of a runner while it captures, as captured segments belong to no backend."""

    name = "idle"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        devices=frozenset({"cpu", "cuda"}),
        gqa=True,
    )

    def init_forward_metadata(self, batch: PrefillBatch) -> Metadata:
        """Prepare nothing."""
        return None

    def warm_up(self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]) -> None:
        """Run nothing."""

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Metadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Refuse to run."""
        raise NotImplementedError("the idle backend only stands in during capture")


def idle_backend(spec: AttentionSpec) -> IdleBackend:
    """Return an idle backend; it allocates nothing, so its limits do not matter."""
    limits = BackendLimits(max_tokens=0, max_requests=0, max_context=0, num_pages=0)
    return IdleBackend(spec, limits, torch.device("cpu"))
