"""Backends that do something else with their output than they should, or something unusual that does no harm.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import Capabilities, PagedKVCache
from bcg_harness.testing.mask_backend import LayerCall, MaskBackend


class _Returns(MaskBackend):
    """Attend into a tensor of its own, and return what ``result`` makes of it; declares that it writes ``out``."""

    def attend(self, call: LayerCall) -> Tensor:
        """Leave ``out_RNH`` alone."""
        own_RNH = super().attend(replace(call, out_RNH=torch.empty_like(call.out_RNH)))
        return self.result(own_RNH, call.out_RNH)

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Return what the core is given."""
        return own_RNH


class IgnoresOut(_Returns):
    """Declare that ``out`` is written, and return another tensor, which costs a copy a layer."""

    name: ClassVar[str] = "ignores-out"


class _ReturnsAnother(_Returns):
    """Declare rightly that ``out`` is not written."""

    capabilities: ClassVar[Capabilities] = replace(MaskBackend.capabilities, supports_out=False)

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
        """Attend without ``out``, which is not offered."""
        own_RNH = torch.empty_like(q_RNH, memory_format=torch.contiguous_format)
        return super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, own_RNH)


class ReturnsNewTensor(_ReturnsAnother):
    """Return a new tensor: no fault, the core copies and counts it."""

    name: ClassVar[str] = "returns-new-tensor"


class ReturnsOffsetView(_ReturnsAnother):
    """Return a view that begins inside of a larger tensor: no fault, the core copies by shape and strides."""

    name: ClassVar[str] = "returns-offset-view"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Put the result between rows of NaN."""
        nan = torch.full_like(own_RNH[:1], float("nan"))
        return torch.cat([nan, own_RNH, nan])[1:-1]


class ReturnsStrided(_ReturnsAnother):
    """Return the right shape over transposed memory: no fault, the core copies by shape and strides."""

    name: ClassVar[str] = "returns-strided"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Keep heads first in memory."""
        return own_RNH.transpose(0, 1).contiguous().transpose(0, 1)


class ReturnsTransposed(_ReturnsAnother):
    """Return heads first, as kernels with another layout do."""

    name: ClassVar[str] = "returns-transposed"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Return ``[N, R, H]``."""
        return own_RNH.transpose(0, 1)


class ReturnsTransposedSquare(_ReturnsAnother):
    """Return heads first for as many tokens as heads alone, where the shape is right."""

    name: ClassVar[str] = "returns-transposed-square"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Swap the two where nobody can tell by the shape."""
        rows, heads, _ = own_RNH.shape
        return own_RNH.transpose(0, 1) if rows == heads else own_RNH


class ReturnsOtherDtype(_ReturnsAnother):
    """Return float64, as it was computed."""

    name: ClassVar[str] = "returns-other-dtype"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Widen the result."""
        return own_RNH.double()


class ReturnsOtherDevice(_ReturnsAnother):
    """Return a tensor on a device that the model is not on."""

    name: ClassVar[str] = "returns-other-device"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Keep the shape alone."""
        return own_RNH.to("meta")


class ReturnsPaddedRows(_ReturnsAnother):
    """Return as many rows as a larger batch would have."""

    name: ClassVar[str] = "returns-padded-rows"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Add a row."""
        return torch.cat([own_RNH, own_RNH[:1]])


class LeavesOutUnwritten(_Returns):
    """Return ``out`` without having written it, as a kernel that gives up on a shape does."""

    name: ClassVar[str] = "leaves-out-unwritten"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Return what was given."""
        return out_RNH


class WritesNaNBehindRows(_Returns):
    """Write the real rows, and NaN to all that follow in the memory of ``out``."""

    name: ClassVar[str] = "writes-nan-behind-rows"

    def result(self, own_RNH: Tensor, out_RNH: Tensor) -> Tensor:
        """Spoil the padded rows of the bucket and those beyond."""
        stop = out_RNH.storage_offset() + out_RNH.numel()
        everything = out_RNH.untyped_storage().nbytes() // out_RNH.element_size()
        out_RNH.as_strided((everything - stop,), (1,), stop).fill_(float("nan"))
        return out_RNH.copy_(own_RNH)


class WritesLate(MaskBackend):
    """Write a result when the next layer is asked for, as work on a stream that nobody waits for may."""

    name: ClassVar[str] = "writes-late"
    _late: tuple[Tensor, Tensor] | None = None

    def attend(self, call: LayerCall) -> Tensor:
        """Attend into a tensor of its own, and write that of the layer before."""
        own_RNH = super().attend(replace(call, out_RNH=torch.empty_like(call.out_RNH)))
        if self._late is not None:
            target, value = self._late
            target.copy_(value)
        self._late = call.out_RNH, own_RNH
        return call.out_RNH


class RunsOnAnotherStream(MaskBackend):
    """Attend on a stream of its own, late, and let nobody wait for it; on CUDA only."""

    name: ClassVar[str] = "runs-on-another-stream"

    def attend(self, call: LayerCall) -> Tensor:
        """Begin when the caller's stream is ready, and leave the end to chance."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about 10 ms
            return super().attend(call)
