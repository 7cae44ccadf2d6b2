"""Attention through ``torch.nn.attention.varlen``, PyTorch's own variable-length kernel.

Shape letters: R real tokens, S keys of all requests, N query heads, K KV heads, H head dim.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from bcg_backends.varlen import VarlenBackend, VarlenMetadata
from bcg_backends.vendor import FLASH_KERNEL, refuse_head_dim
from bcg_core import AttentionSpec, BackendLimits

CAUSAL = (-1, 0)


class TorchVarlenBackend(VarlenBackend):
    """Serve 16-bit types on CUDA with torch alone, one launch a layer.

    torch 2.11 neither writes ``out`` nor reads pages, so results are copied and cached keys gathered. Newer releases
    want grouped heads named; what exists is read off the signature.
    """

    name = "torch_varlen"
    capabilities = FLASH_KERNEL

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn
        grouped = "enable_gqa" in signature(varlen_attn).parameters
        self._options: dict[str, Any] = {"enable_gqa": spec.group_size > 1} if grouped else {}

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add what the flash kernel needs of the head dim."""
        return super().unsupported(spec, device) or refuse_head_dim(spec)

    def attend_flat(
        self,
        q_RNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend over flat keys; returns a new tensor."""
        result = self._attend(
            q_RNH,
            k_SKH,
            v_SKH,
            metadata.cu_new_lens,
            metadata.cu_kv_lens,
            metadata.max_new_len,
            metadata.max_kv_len,
            scale=self.spec.scale,
            window_size=CAUSAL,
            **self._options,
        )
        assert isinstance(result, Tensor), "a tuple comes only where more was asked for"
        return result
