"""Attention through ``torch.nn.attention.varlen``, PyTorch's own variable-length kernel.

Shape letters: R real tokens, S keys of all requests, N query heads, K KV heads, H head dim.
"""

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from bcg_backends.varlen import VarlenBackend, VarlenMetadata
from bcg_backends.vendor import FLASH_KERNEL, refuse_head_dim
from bcg_core import AttentionSpec, BackendLimits, PagedKVCache

CAUSAL = (-1, 0)
PAGE_MULTIPLE = 256


class TorchVarlenBackend(VarlenBackend):
    """Serve 16-bit types on CUDA with torch alone, one launch a layer.

    torch 2.11 neither writes ``out`` nor reads pages, so results are copied and cached keys gathered. Newer releases
    have an entry that writes ``out``, take page tables and a number of splits, and want grouped heads named. What there
    is, is read off the installed functions.
    """

    name = "torch_varlen"
    capabilities = replace(
        FLASH_KERNEL,
        supports_out=hasattr(varlen, "varlen_attn_out"),
        preferred_page_multiple=(
            PAGE_MULTIPLE if "block_table" in signature(varlen.varlen_attn).parameters else 1
        ),
    )

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self._attend = varlen.varlen_attn
        self._attend_out = getattr(varlen, "varlen_attn_out", None)
        options = {"enable_gqa": spec.group_size > 1, "num_splits": 1}
        self._parameters = signature(self._attend).parameters
        self._options = {name: options[name] for name in options if name in self._parameters}

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add what the flash kernel needs of the head dim."""
        return super().unsupported(spec, device) or refuse_head_dim(spec)

    def reads_pages(self, spec: AttentionSpec) -> bool:
        """Tell whether this torch takes page tables, and pages are multiples of 256 tokens."""
        return "block_table" in self._parameters and spec.page_size % PAGE_MULTIPLE == 0

    def attend_flat(
        self,
        q_RNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend over flat keys."""
        return self._launch(q_RNH, k_SKH, v_SKH, metadata, out_RNH)

    def attend_pages(
        self,
        q_RNH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend over pages."""
        return self._launch(
            q_RNH,
            kv_cache.keys(layer),
            kv_cache.values(layer),
            metadata,
            out_RNH,
            seqused_k=metadata.kv_lens,
            block_table=metadata.page_table_BW,
        )

    def _launch(
        self,
        q_RNH: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
        **pages: Tensor,
    ) -> Tensor:
        """Make the one call; told of a longest request of at least 2, below which the kernel regroups queries."""
        arguments: tuple[Any, ...] = (
            q_RNH,
            keys,
            values,
            metadata.cu_new_lens,
            metadata.cu_kv_lens,
            max(metadata.max_new_len, 2),
            metadata.max_kv_len,
        )
        options: dict[str, Any] = {
            "scale": self.spec.scale,
            "window_size": CAUSAL,
            **self._options,
            **pages,
        }
        if out_RNH is None or self._attend_out is None:
            result = self._attend(*arguments, **options)
        else:
            result = self._attend_out(out_RNH, *arguments, **options)
        assert isinstance(result, Tensor), "a tuple comes only where more was asked for"
        return result
