"""Backends that plan for another batch than the one at hand, or plan otherwise than they should.

Shape letters: R real tokens, S slots of the whole KV cache, B requests, N query heads, K KV heads, H head dim.
"""

from bisect import bisect
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import AttentionSpec, BackendLimits, PrefillBatch
from bcg_harness.testing.mask_backend import LayerCall, MaskBackend


class FreezesBoundaries(MaskBackend):
    """Keep the request boundaries of the first batch, as a frozen ``cu_seqlens`` does; all else is live."""

    name: ClassVar[str] = "freezes-boundaries"
    _ends: tuple[int, ...] = ()

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Take each row for one of the request that had it in the first batch."""
        if batch.sequences and not self._ends:
            self._ends = batch.cu_new_lens[1:]
        if not self._ends:
            return super().init_forward_metadata(batch)
        mask_RS = torch.zeros(batch.num_tokens, self.num_slots, dtype=torch.bool)
        for row in range(batch.num_tokens):
            request = min(bisect(self._ends, row), batch.num_requests - 1)
            first = self._ends[request - 1] if 0 < request <= len(self._ends) else 0
            seen = batch.prefix_lens[request] + row - first + 1
            mask_RS[row, self.request_slots(batch, request)[: max(1, seen)]] = True
        return mask_RS


class CachesByShape(MaskBackend):
    """Keep what was prepared for a batch, and give it to every batch with as many tokens and requests."""

    name: ClassVar[str] = "caches-by-shape"

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Look the shape up; scratch batches of a warm-up are not kept."""
        if not batch.sequences:
            return super().init_forward_metadata(batch)
        key = batch.num_tokens, batch.num_requests
        if key not in self._masks:
            self._masks[key] = super().init_forward_metadata(batch)
        return self._masks[key]


class SharesPlans(MaskBackend):
    """Keep plan state by the number of requests, so that two buckets share it."""

    name: ClassVar[str] = "shares-plans"

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self._plans: dict[int, Tensor] = {}

    def update_bucket_metadata(self, metadata: Tensor | None, batch: PrefillBatch) -> Tensor:
        """Plan when this many requests come for the first time, whatever the bucket."""
        if batch.num_requests not in self._plans:
            mask_MS = torch.zeros(self.limits.max_tokens, self.num_slots, dtype=torch.bool)
            mask_MS[: batch.num_tokens] = self.init_forward_metadata(batch)
            self._plans[batch.num_requests] = mask_MS
        return self._plans[batch.num_requests]


class CapsLength(MaskBackend):
    """Take the longest request of the first batch for a maximum, beyond which keys are dropped."""

    name: ClassVar[str] = "caps-length"
    _longest: int | None = None

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Cut what is longer."""
        if batch.sequences and self._longest is None:
            self._longest = batch.max_kv_len
        return [slots[: self._longest] for slots in super().visible_slots(batch, request)]


class DropsFullLastPage(MaskBackend):
    """Count tokens of the last page as length modulo page size, which is 0 where the page is full."""

    name: ClassVar[str] = "drops-full-last-page"

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Leave the last page out where the whole request fills it."""
        length = batch.kv_lens[request]
        last = batch.page_size if length % batch.page_size == 0 and length > batch.page_size else 0
        return [slots[: length - last] for slots in super().visible_slots(batch, request)]


class DividesByRequests(MaskBackend):
    """Plan with a division by the number of requests, as FlashInfer does: dies of an empty batch."""

    name: ClassVar[str] = "divides-by-requests"

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Divide, then plan."""
        assert batch.num_tokens // batch.num_requests >= 1
        return super().init_forward_metadata(batch)


class ErrsInCompany(MaskBackend):
    """Be off by 1 % in one head when there are several requests: what a comparison of single requests hides."""

    name: ClassVar[str] = "errs-in-company"
    _factor = 1.01

    def attend(self, call: LayerCall) -> Tensor:
        """Attend, and scale the first head where the last row sees nothing of what the first sees."""
        result = super().attend(call)
        alone = (call.mask_RS[0] & call.mask_RS[-1]).any()
        result[:, 0].mul_(torch.where(alone, 1.0, self._factor))
        return result


class SplitsByComposition(ErrsInCompany):
    """Round otherwise when there are several requests, as split heuristics do: no fault."""

    name: ClassVar[str] = "splits-by-composition"

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self._factor = 1 + torch.finfo(spec.dtype).eps


class InterleavesHeads(MaskBackend):
    """Read KV head n % K for query head n, where groups of neighbours share one."""

    name: ClassVar[str] = "interleaves-heads"

    def attend(self, call: LayerCall) -> Tensor:
        """Put the query heads into the wrong groups, and back."""
        heads, groups = self.spec.num_heads, self.spec.num_kv_heads
        order = torch.arange(heads).view(-1, groups).t().flatten()
        out_RNH = torch.empty_like(call.out_RNH)
        call.out_RNH[:, order] = super().attend(
            replace(call, q_RNH=call.q_RNH[:, order], out_RNH=out_RNH)
        )
        return call.out_RNH
