"""Backends that change, or read too early, what belongs to the core.

Shape letters: R real tokens, S slots of the whole KV cache, B requests, W pages of the longest request, N query heads,
K KV heads, H head dim.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import Capabilities, PagedKVCache, PrefillBatch
from bcg_harness.testing.mask_backend import LayerCall, MaskBackend


class ChangesQueries(MaskBackend):
    """Scale the queries in place, although they belong to the caller."""

    name: ClassVar[str] = "changes-queries"

    def attend(self, call: LayerCall) -> Tensor:
        """Attend rightly, then leave the queries scaled."""
        result = super().attend(call)
        call.q_RNH.mul_(self.spec.scale)
        return result


class ChangesKeys(MaskBackend):
    """Scale the new keys in place, although they belong to the caller."""

    name: ClassVar[str] = "changes-keys"

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
        """Attend rightly, then leave them scaled."""
        result = super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
        self.spoil(k_RKH, v_RKH)
        return result

    def spoil(self, k_RKH: Tensor, v_RKH: Tensor) -> None:
        """Change what should stay."""
        k_RKH.mul_(self.spec.scale)


class ChangesValues(ChangesKeys):
    """Scale the new values in place, although they belong to the caller."""

    name: ClassVar[str] = "changes-values"

    def spoil(self, k_RKH: Tensor, v_RKH: Tensor) -> None:
        """Change what should stay."""
        v_RKH.mul_(self.spec.scale)


class ChangesCachedKeys(MaskBackend):
    """Round the new keys where they lie in the cache, as kernels that append them once more do.

    Meant for requests without a prefix, whose new tokens are all that their rows see.
    """

    name: ClassVar[str] = "changes-cached-keys"
    which: ClassVar[int] = 0

    def attend(self, call: LayerCall) -> Tensor:
        """Attend rightly, then round."""
        result = super().attend(call)
        cached_SKH = call.kv_cache.flat(call.layer)[self.which]
        seen_S = call.mask_RS.any(dim=0)
        rounded_SKH = cached_SKH.to(torch.float8_e5m2).to(cached_SKH.dtype)
        cached_SKH.copy_(torch.where(seen_S[:, None, None], rounded_SKH, cached_SKH))
        return result


class ChangesCachedValues(ChangesCachedKeys):
    """Round the new values where they lie in the cache."""

    name: ClassVar[str] = "changes-cached-values"
    which: ClassVar[int] = 1


class AddsToForeignSlot(MaskBackend):
    """Stand NaN in slots of nobody, as it claims, and add to the values of one of them in place."""

    name: ClassVar[str] = "adds-to-foreign-slot"
    capabilities: ClassVar[Capabilities] = replace(
        MaskBackend.capabilities, ignores_foreign_nan=True, supports_full_graph=False
    )

    def cached(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Replace NaN before anything is multiplied."""
        keys_SKH, values_SKH = super().cached(call)
        return keys_SKH.nan_to_num(), values_SKH.nan_to_num()

    def attend(self, call: LayerCall) -> Tensor:
        """Attend rightly, then add to the last slot that no row sees."""
        result = super().attend(call)
        slot = (~call.mask_RS.any(dim=0)).nonzero().flatten()[-1]
        call.kv_cache.flat(call.layer)[1][slot].add_(1)
        return result


class ChangesPageTable(MaskBackend):
    """Mark the unused entries of the batch's page table on the host, as kernels with another padding want them."""

    name: ClassVar[str] = "changes-page-table"

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Plan, and write -1 behind the pages of each request."""
        for pages_W, length in zip(batch.page_table_BW, batch.kv_lens, strict=True):
            pages_W[-(-length // batch.page_size) :] = -1
        return super().init_forward_metadata(batch)


class ChangesDeviceLengths(MaskBackend):
    """Turn the batch's lengths on the device into positions of last tokens, in place."""

    name: ClassVar[str] = "changes-device-lengths"

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Plan, and subtract 1."""
        batch.on_device.kv_lens.sub_(1)
        return super().init_forward_metadata(batch)


class SpoilsReservedPage(MaskBackend):
    """Take page 0, which no request owns, for scratch memory, and leave NaN there."""

    name: ClassVar[str] = "spoils-reserved-page"

    def attend(self, call: LayerCall) -> Tensor:
        """Attend rightly, then spoil the keys of one slot."""
        result = super().attend(call)
        call.kv_cache.keys(call.layer)[0, 1] = float("nan")
        return result


class ReadsEarly(MaskBackend):
    """Attend on a stream of its own that does not wait for its inputs, and have the caller wait; on CUDA only."""

    name: ClassVar[str] = "reads-early"

    def attend(self, call: LayerCall) -> Tensor:
        """Begin at once, and join in the end."""
        side = torch.cuda.Stream(self.device)
        with torch.cuda.stream(side):
            result = super().attend(call)
        torch.cuda.current_stream(self.device).wait_stream(side)
        return result
