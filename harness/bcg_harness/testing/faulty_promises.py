"""Backends that are right one batch at a time, on small logits and with breaks, and wrong beyond.

Shape letters: R real tokens, T bucket tokens, S slots of the whole KV cache, N query heads, K KV heads, H head dim,
G = N / K query heads of a group.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import Capabilities, PagedKVCache, PrefillBatch
from bcg_harness.testing.mask_backend import LayerCall, MaskBackend

_WITH_BREAKS: Capabilities = replace(MaskBackend.capabilities, supports_full_graph=False)


class KeepsLastPlan(MaskBackend):
    """Keep the plan in the instance, and attend with the last one, whatever metadata is passed."""

    name: ClassVar[str] = "keeps-last-plan"
    capabilities: ClassVar[Capabilities] = _WITH_BREAKS
    _plan: Tensor

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Plan, and remember."""
        self._plan = super().init_forward_metadata(batch)
        return self._plan

    def attend(self, call: LayerCall) -> Tensor:
        """Attend with what was remembered."""
        return super().attend(replace(call, mask_RS=self._plan))


class KeepsLastPlanNoisily(KeepsLastPlan):
    """Do the same, and declare that other bits are to be expected."""

    name: ClassVar[str] = "keeps-last-plan-noisily"
    capabilities: ClassVar[Capabilities] = replace(_WITH_BREAKS, deterministic=False)

    def attend(self, call: LayerCall) -> Tensor:
        """Take the first row's view of the last plan for those that it lacks."""
        plan_RS, rows = self._plan, call.q_RNH.shape[0]
        missing = plan_RS[:1].expand(max(0, rows - plan_RS.shape[0]), -1)
        return MaskBackend.attend(self, replace(call, mask_RS=torch.cat([plan_RS, missing])[:rows]))


class SharesPlanSlots(MaskBackend):
    """Let two plan slots take turns, and share them among all instances of the class."""

    name: ClassVar[str] = "shares-plan-slots"
    capabilities: ClassVar[Capabilities] = _WITH_BREAKS
    _shared: ClassVar[dict[tuple[int, int], list[Tensor]]] = {}

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Plan into the slot that was planned longest ago."""
        shape = self.limits.max_tokens, self.num_slots
        slots = self._shared.setdefault(shape, [])
        slot_MS = slots.pop(0) if len(slots) == 2 else torch.empty(shape, dtype=torch.bool)
        slots.append(slot_MS)
        return slot_MS[: batch.num_tokens].copy_(super().init_forward_metadata(batch))


class NeverRefreshesGraph(MaskBackend):
    """Give the captured attention metadata of its own, which nobody refreshes."""

    name: ClassVar[str] = "never-refreshes-graph"

    def full_graph_metadata(self, metadata: Tensor | None, bucket: int) -> Tensor:
        """Copy the mask of the bucket as it is before the first batch."""
        return super().full_graph_metadata(metadata, bucket).clone()


class CannotBeCaptured(MaskBackend):
    """Declare that attention can be captured, and fail when it is to be."""

    name: ClassVar[str] = "cannot-be-captured"

    def full_graph_metadata(self, metadata: Tensor | None, bucket: int) -> Tensor:
        """Raise."""
        raise RuntimeError("no plan for a bucket")


class WritesCacheInGraph(MaskBackend):
    """Clear keys of others, but only where attention is captured."""

    name: ClassVar[str] = "writes-cache-in-graph"

    def full_graph_metadata(self, metadata: Tensor | None, bucket: int) -> Tensor:
        """Remember the masks of captured attention."""
        mask_TS = super().full_graph_metadata(metadata, bucket)
        self._captured = [*getattr(self, "_captured", []), mask_TS]
        return mask_TS

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
        """Attend rightly, then clear the keys that no row sees."""
        result = super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
        if any(metadata is mask_TS for mask_TS in getattr(self, "_captured", [])):
            unseen_S = ~metadata.any(dim=0)
            kv_cache.flat(layer)[0].masked_fill_(unseen_S[:, None, None], 0)
        return result


class OverflowsSoftmax(MaskBackend):
    """Exponentiate logits in float32 as they are, without subtracting the largest."""

    name: ClassVar[str] = "overflows-softmax"
    capabilities: ClassVar[Capabilities] = _WITH_BREAKS

    def weights(self, logits_KGRS: Tensor, mask_RS: Tensor) -> Tensor:
        """Divide exponentials by their sum."""
        powers_KGRS = logits_KGRS.float().exp().masked_fill(~mask_RS, 0.0)
        return (powers_KGRS / powers_KGRS.sum(dim=-1, keepdim=True)).double()


class MasksSoftly(MaskBackend):
    """Mask with -40, which is as good as minus infinity among logits near 0."""

    name: ClassVar[str] = "masks-softly"
    capabilities: ClassVar[Capabilities] = _WITH_BREAKS

    def weights(self, logits_KGRS: Tensor, mask_RS: Tensor) -> Tensor:
        """Give what is masked a logit of -40."""
        return logits_KGRS.masked_fill(~mask_RS, -40.0).softmax(dim=-1)
