"""Attention through xFormers' memory-efficient attention.

Shape letters: R real tokens, S keys of all requests, N query heads, K KV heads, G query heads a KV head, H head dim.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bcg_backends.vendor import FLASH_KERNEL, import_error, refuse_head_dim
from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    PagedKVCache,
    PrefillBatch,
)


@dataclass(frozen=True, kw_only=True)
class MaskedBatch:
    """Hold what a batch needs: its mask, and the cache rows to gather.

    Attributes:
        bias: bottom-right causal mask, block-diagonal over requests.
        slots_S: int64 on the device, flat slots of all keys; None when nothing is cached before the new tokens.
    """

    bias: Any
    slots_S: Tensor | None


class XFormersBackend(AttentionBackend):
    """Serve 16-bit types on CUDA with the flash operator of xFormers.

    The operator is pinned: left to choose, xFormers takes one that runs grouped heads on side streams (issue 1392). It
    neither writes ``out`` nor reads pages in prefill, so results are copied and cached keys gathered.
    """

    name = "xformers"
    capabilities = replace(FLASH_KERNEL, needs_host_plan=True)

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        fmha = import_module("xformers.ops.fmha")
        self._attend = fmha.memory_efficient_attention_forward
        self._operator = fmha.flash.FwOp
        self._mask = fmha.attn_bias.BlockDiagonalCausalFromBottomRightMask

    @classmethod
    def unavailable(cls) -> str | None:
        """Say whether xFormers can be imported with its extension."""
        reason = import_error("xformers.ops.fmha", "pip install xformers")
        if reason is not None or not torch.cuda.is_available():
            return reason
        reason = _extension_error()
        if reason is None and not import_module("xformers.ops.fmha").flash.FwOp.is_available():
            return "its flash operator is not available: python -m xformers.info says why"
        return reason

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add what the flash operator needs of the head dim."""
        return super().unsupported(spec, device) or refuse_head_dim(spec)

    def init_forward_metadata(self, batch: PrefillBatch) -> MaskedBatch:
        """Make the mask, and find the rows to gather."""
        bias = self._mask.from_seqlens(
            list(batch.new_lens), list(batch.kv_lens), device=self.device
        )
        return MaskedBatch(bias=bias, slots_S=batch.kv_slots if any(batch.prefix_lens) else None)

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: MaskedBatch,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend with grouped heads as a dimension of their own; returns a new tensor."""
        if metadata.slots_S is not None:
            keys, values = kv_cache.flat(layer)
            k_RKH = keys.index_select(0, metadata.slots_S)
            v_RKH = values.index_select(0, metadata.slots_S)
        groups = self.spec.group_size
        q_1RKGH = q_RNH.view(1, -1, self.spec.num_kv_heads, groups, self.spec.head_dim)
        result: Tensor = self._attend(
            q_1RKGH,
            _expand(k_RKH, groups),
            _expand(v_RKH, groups),
            attn_bias=metadata.bias,
            scale=self.spec.scale,
            op=self._operator,
        )
        return result.view(q_RNH.shape)


def _expand(kv_SKH: Tensor, groups: int) -> Tensor:
    """Return ``[1, S, K, G, H]`` in which the G query heads of a group share memory."""
    return kv_SKH.unsqueeze(2).expand(1, -1, -1, groups, -1)


def _extension_error() -> str | None:
    """Explain the case in which xFormers imports, but refuses every CUDA tensor."""
    if import_module("xformers")._has_cpp_library:
        return None
    return (
        "its CUDA extension did not load, and without it every operator refuses CUDA tensors: the wheel needs "
        "libcudart.so.12, so install nvidia-cuda-runtime-cu12 and put its lib folder on LD_LIBRARY_PATH"
    )
