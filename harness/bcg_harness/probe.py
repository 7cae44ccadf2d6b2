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
from bcg_harness.oracle import cached_slots, measure_attention


@dataclass(kw_only=True)
class Trace:
    """Record what a backend was asked for during one forward.

    Attributes:
        judges: compare every layer with the oracle, which costs time.
        slots: where the cache holds each request's tokens; filled when it judges.
        batches: what metadata was prepared for, once each time.
        layers: the layers attended to, in order.
        rows: how many rows each of them had.
        measured: errors of each layer and request.
        input_problems: what was wrong with the inputs of some layer.
    """

    judges: bool = False
    slots: list[Tensor] = field(default_factory=list)
    batches: list[PrefillBatch] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    input_problems: list[str] = field(default_factory=list)


class Probe(DelegatingBackend):
    """Delegate everything to ``inner`` and write down what happens in ``trace``, which the harness replaces."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner)
        self.trace = Trace()

    def init_forward_metadata(self, batch: PrefillBatch) -> Metadata:
        """Delegate, and write down the batch."""
        self.trace.batches.append(batch)
        return super().init_forward_metadata(batch)

    def update_bucket_metadata(self, metadata: Metadata | None, batch: PrefillBatch) -> Metadata:
        """Delegate, and write down the batch."""
        self.trace.batches.append(batch)
        return super().update_bucket_metadata(metadata, batch)

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
            return super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
        batch = trace.batches[-1]
        given = q_RNH.clone(), k_RKH.clone(), v_RKH.clone()
        # Judging waits for the device, whatever a debug tool forbids the backend.
        with synchronisation("default"):
            trace.slots = trace.slots or cached_slots(batch)
            self._check_cache(batch, kv_cache, layer, *given[1:])
        result = super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
        with synchronisation("default"):
            for name, before, after in zip("qkv", given, (q_RNH, k_RKH, v_RKH), strict=True):
                if not bit_equal(before, after):
                    trace.input_problems.append(f"layer {layer}: the backend changed {name}")
            trace.measured += measure_attention(
                result, given[0], batch, trace.slots, kv_cache, layer, scale=self.spec.scale
            )
        return result

    def _check_cache(
        self, batch: PrefillBatch, kv_cache: PagedKVCache, layer: int, k_RKH: Tensor, v_RKH: Tensor
    ) -> None:
        slots = batch.slot_mapping_R.to(kv_cache.device)
        if len(slots) != len(k_RKH):
            self.trace.input_problems.append(
                f"layer {layer}: the backend was given {len(k_RKH)} rows for {len(slots)} tokens"
            )
            return
        keys, values = kv_cache.flat(layer)
        for name, cached, new in (("keys", keys, k_RKH), ("values", values, v_RKH)):
            if not bit_equal(cached[slots], new):
                self.trace.input_problems.append(
                    f"layer {layer}: the slots of the batch do not hold its {name}"
                )


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
