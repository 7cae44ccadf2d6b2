"""A slow, correct attention backend in plain torch, which uses both metadata paths and writes its output in place.

Shape letters: R real tokens, T bucket tokens, S slots of the whole KV cache, N query heads, K KV heads, H head dim,
G = N / K query heads of a group.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    Capabilities,
    PagedKVCache,
    PrefillBatch,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCall:
    """Hold what one call of ``forward`` is given, but for the new keys and values: they are in the cache already.

    Attributes:
        q_RNH: queries, which belong to the caller.
        kv_cache: keys and values of all layers.
        layer: which of them.
        mask_RS: True where a row may look.
        out_RNH: where the result goes.
    """

    q_RNH: Tensor
    kv_cache: PagedKVCache
    layer: int
    mask_RS: Tensor
    out_RNH: Tensor


class MaskBackend(AttentionBackend):
    """Attend over every slot of the KV cache, behind a mask that says which of them a row may see.

    The mask of a bucket keeps its address and is refreshed in place, so attention can be captured in a full graph; rows
    that may see nothing become zero. Faulty backends for tests derive from this one, and get the mask or ``attend``
    wrong.
    """

    name: ClassVar[str] = "mask"
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        devices=frozenset({"cpu", "cuda"}),
        gqa=True,
        cached_prefix=True,
        supports_out=True,
        needs_host_plan=False,
        supports_full_graph=True,
        deterministic=True,
    )

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self.scale = spec.scale
        self.num_slots = limits.num_pages * spec.page_size

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Return the slots that each new token of ``request`` sees, in the order of its new tokens."""
        slots_S = self.request_slots(batch, request)
        first = batch.prefix_lens[request] + 1
        return [slots_S[: first + token] for token in range(batch.new_lens[request])]

    def request_slots(self, batch: PrefillBatch, request: int) -> Tensor:
        """Return the slots of all tokens of ``request``, cached and new, in order."""
        pages = batch.page_table_BW[request].to(torch.int64)
        slots = pages[:, None] * batch.page_size + torch.arange(batch.page_size)
        return slots.flatten()[: batch.kv_lens[request]]

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Return a new mask, ``[R, S]``, True where a row may look."""
        mask_RS = torch.zeros(batch.num_tokens, self.num_slots, dtype=torch.bool)
        rows = (
            visible
            for request in range(batch.num_requests)
            for visible in self.visible_slots(batch, request)
        )
        for row, visible in enumerate(rows):
            mask_RS[row, visible] = True
        return mask_RS.to(self.device)

    def init_bucket_metadata(self, bucket: int) -> Tensor:
        """Return the mask of ``bucket``, ``[T, S]``, which lives as long as the bucket."""
        return torch.zeros(bucket, self.num_slots, dtype=torch.bool, device=self.device)

    def update_bucket_metadata(self, metadata: Tensor | None, batch: PrefillBatch) -> Tensor:
        """Refresh the mask in place."""
        assert metadata is not None
        metadata.zero_()
        metadata[: batch.num_tokens].copy_(self.init_forward_metadata(batch))
        return metadata

    def full_graph_metadata(self, metadata: Tensor | None, bucket: int) -> Tensor:
        """Return the mask of the bucket."""
        assert metadata is not None
        return metadata

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Tensor,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend with the rows of the mask that are live."""
        assert out_RNH is not None, "the core offers out to a backend that supports it"
        mask_RS = metadata[: q_RNH.shape[0]]
        return self.attend(
            LayerCall(q_RNH=q_RNH, kv_cache=kv_cache, layer=layer, mask_RS=mask_RS, out_RNH=out_RNH)
        )

    def attend(self, call: LayerCall) -> Tensor:
        """Attend in float64, in which results do not depend on how many rows there are, and write to ``out_RNH``."""
        keys_SKH, values_SKH = self.cached(call)
        q_RKGH = call.q_RNH.double().unflatten(1, (self.spec.num_kv_heads, -1))
        logits_KGRS = torch.einsum("rkgh,skh->kgrs", q_RKGH, keys_SKH) * self.scale
        weights_KGRS = self.weights(logits_KGRS, call.mask_RS)
        result_RKGH = torch.einsum("kgrs,skh->rkgh", weights_KGRS, values_SKH)
        return call.out_RNH.copy_(result_RKGH.flatten(1, 2))

    def cached(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Return keys and values of every slot, in float64."""
        keys_SKH, values_SKH = call.kv_cache.flat(call.layer)
        return keys_SKH.double(), values_SKH.double()

    def weights(self, logits_KGRS: Tensor, mask_RS: Tensor) -> Tensor:
        """Return the softmax over the slots that a row sees."""
        weights_KGRS = logits_KGRS.masked_fill(~mask_RS, float("-inf")).softmax(dim=-1)
        return weights_KGRS.masked_fill(~mask_RS, 0.0)  # NaN where it sees nothing
