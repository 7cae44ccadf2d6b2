"""Attention through ``torch.nn.attention.varlen``, PyTorch's own variable-length kernel.

Shape letters: R real tokens, S keys of all requests, N query heads, K KV heads, H head dim.
"""

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from bcg_backends.varlen import VarlenBackend, VarlenMetadata, refuse_page_size
from bcg_backends.vendor import FLASH_KERNEL, refuse_head_dim
from bcg_core import AttentionSpec, BackendLimits

CAUSAL = (-1, 0)
PAGE_MULTIPLE = 256


def _takes_pages() -> bool:
    return "block_table" in signature(varlen.varlen_attn).parameters


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
        preferred_page_multiple=PAGE_MULTIPLE if _takes_pages() else 1,
        # What is not written in place is copied whole, rows that the kernel leaves undefined included.
        supports_full_graph=_takes_pages() and hasattr(varlen, "varlen_attn_out"),
    )

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self._attend = varlen.varlen_attn
        self._attend_out = getattr(varlen, "varlen_attn_out", None)
        options = {"enable_gqa": spec.group_size > 1, "num_splits": 1}
        taken = signature(self._attend).parameters
        self._options = {name: options[name] for name in options if name in taken}

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add what the flash kernel needs of the head dim."""
        return super().unsupported(spec, device) or refuse_head_dim(spec)

    @classmethod
    def refuse_pages(cls, spec: AttentionSpec) -> str | None:
        """Say whether this torch takes no page tables, or pages are other than multiples of 256 tokens."""
        if not _takes_pages():
            return f"torch {torch.__version__} takes no page table (2.13 does)"
        return refuse_page_size(spec, PAGE_MULTIPLE)

    def launch(
        self,
        q_RNH: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
        *,
        paged: bool,
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
        }
        if paged:
            options |= {"seqused_k": metadata.kv_lens, "block_table": metadata.page_table_BW}
        if out_RNH is None or self._attend_out is None:
            result = self._attend(*arguments, **options)
        else:
            result = self._attend_out(out_RNH, *arguments, **options)
        assert isinstance(result, Tensor), "a tuple comes only where more was asked for"
        return result
