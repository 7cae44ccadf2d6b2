"""Backends with one fault each, to prove that the checks find it.

Shape letters: R real tokens, S slots of the KV cache, N query heads, H head dim.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import AttentionSpec, BackendLimits, Capabilities, PrefillBatch
from bcg_harness.testing.mask_backend import LayerCall, MaskBackend


class IgnoresLengths(MaskBackend):
    """Take the batch for one long request, so that requests attend to those before them."""

    name: ClassVar[str] = "ignores-lengths"

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Add all slots of the earlier requests."""
        earlier = [self.request_slots(batch, number) for number in range(request)]
        return [torch.cat([*earlier, own]) for own in super().visible_slots(batch, request)]


class TrustsUnwrittenSlots(MaskBackend):
    """Multiply masked values by zero, and still claim that NaN among them does no harm."""

    name: ClassVar[str] = "trusts-unwritten-slots"
    capabilities: ClassVar[Capabilities] = replace(
        MaskBackend.capabilities, ignores_foreign_nan=True
    )


class IgnoresPrefix(MaskBackend):
    """Attend to new tokens only."""

    name: ClassVar[str] = "ignores-prefix"

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Leave the cached tokens out."""
        prefix = batch.prefix_lens[request]
        return [visible[prefix:] for visible in super().visible_slots(batch, request)]


class AlignsTopLeft(MaskBackend):
    """Align the causal mask top-left, as if the first new token were the first of its request."""

    name: ClassVar[str] = "aligns-top-left"

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Show new token number t the first t + 1 tokens of the request."""
        slots_S = self.request_slots(batch, request)
        return [slots_S[: token + 1] for token in range(batch.new_lens[request])]


class AssumesContiguousPages(MaskBackend):
    """Read a request's tokens from its first page on, as if pages were neighbours."""

    name: ClassVar[str] = "assumes-contiguous-pages"

    def request_slots(self, batch: PrefillBatch, request: int) -> Tensor:
        """Count on from the first slot."""
        first = int(batch.page_table_BW[request, 0]) * batch.page_size
        slots_S = torch.arange(first, first + batch.kv_lens[request])
        return slots_S % self.num_slots


class ZeroesPageTable(MaskBackend):
    """Take page 0 for every page of every request."""

    name: ClassVar[str] = "zeroes-page-table"

    def request_slots(self, batch: PrefillBatch, request: int) -> Tensor:
        """Stay in the first page."""
        return super().request_slots(batch, request) % batch.page_size


class ScalesTooMuch(MaskBackend):
    """Take a softmax scale that is 1 % too large."""

    name: ClassVar[str] = "scales-too-much"

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self.scale *= 1.01


class KeepsStaleRows(MaskBackend):
    """Refresh the bucket's metadata without clearing what an earlier batch left in it."""

    name: ClassVar[str] = "keeps-stale-rows"

    def update_bucket_metadata(self, metadata: Tensor | None, batch: PrefillBatch) -> Tensor:
        """Add the new mask to the old one."""
        assert metadata is not None
        metadata[: batch.num_tokens].logical_or_(self.init_forward_metadata(batch))
        return metadata


class FreezesMetadata(MaskBackend):
    """Prepare the bucket's metadata for the first batch, and never again."""

    name: ClassVar[str] = "freezes-metadata"

    def update_bucket_metadata(self, metadata: Tensor | None, batch: PrefillBatch) -> Tensor:
        """Leave a mask that has been filled as it is."""
        assert metadata is not None
        return metadata if metadata.any() else super().update_bucket_metadata(metadata, batch)


class FreezesNoisily(FreezesMetadata):
    """Prepare the bucket's metadata once, and declare that results may differ: by more than rounding they must not."""

    name: ClassVar[str] = "freezes-noisily"
    capabilities: ClassVar[Capabilities] = replace(MaskBackend.capabilities, deterministic=False)


class WritesRowR(MaskBackend):
    """Write one row of output more than it was given."""

    name: ClassVar[str] = "writes-row-r"

    def attend(self, call: LayerCall) -> Tensor:
        """Reach behind the end of ``out_RNH``, where its buffer goes on."""
        out_RNH = call.out_RNH
        row, past = out_RNH.shape[1] * out_RNH.shape[2], out_RNH.shape[0]
        start = out_RNH.storage_offset() + past * row
        if (start + row) * out_RNH.element_size() <= out_RNH.untyped_storage().nbytes():
            out_RNH.as_strided((row,), (1,), start).fill_(1.0)
        return super().attend(call)


class GivesNaN(MaskBackend):
    """Return NaN in the first layer, behind which everything is NaN."""

    name: ClassVar[str] = "gives-nan"

    def attend(self, call: LayerCall) -> Tensor:
        """Attend, and spoil the result of layer 0."""
        result = super().attend(call)
        return result.fill_(float("nan")) if call.layer == 0 else result


class WritesCache(MaskBackend):
    """Write to a page of somebody else."""

    name: ClassVar[str] = "writes-cache"

    def attend(self, call: LayerCall) -> Tensor:
        """Attend rightly, then clear every slot that no row sees."""
        result = super().attend(call)
        unseen_S = ~call.mask_RS.any(dim=0)
        call.kv_cache.flat(call.layer)[0][unseen_S] = 0
        return result


class Noisy(MaskBackend):
    """Give other bits for the same call, by a rounding step, and deny it."""

    name: ClassVar[str] = "noisy"
    _calls = 0

    def attend(self, call: LayerCall) -> Tensor:
        """Round the first head up now and then."""
        result = super().attend(call)
        self._calls += 1
        if self._calls % 7 < 3:
            result[:, 0].mul_(1 + torch.finfo(result.dtype).eps)
        return result


class HonestlyNoisy(Noisy):
    """Give other bits for the same call, and say so: no fault."""

    name: ClassVar[str] = "honestly-noisy"
    capabilities: ClassVar[Capabilities] = replace(MaskBackend.capabilities, deterministic=False)


class Raises(MaskBackend):
    """Fail on batches of more than one request."""

    name: ClassVar[str] = "raises"

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Raise for a second request."""
        if batch.num_requests > 1:
            raise RuntimeError("one request at a time, please")
        return super().init_forward_metadata(batch)
