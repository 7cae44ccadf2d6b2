"""FlashAttention 4, through the function that writes ``out`` and reads page tables.

Shape letters: R real tokens, S keys of all requests, N query heads, K KV heads, H head dim.
"""

from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from bcg_backends.flash_attn import FlashAttentionBackend
from bcg_backends.varlen import VarlenMetadata
from bcg_backends.vendor import import_error
from bcg_core import AttentionSpec, BackendLimits


class FlashAttention4(FlashAttentionBackend):
    """FlashAttention 4 (CuTe DSL), through ``_flash_attn_fwd``; kernels compile at their first launch, in warm-up."""

    name = "flash_attn_4"
    capabilities = replace(
        FlashAttentionBackend.capabilities,
        preferred_page_multiple=128,
        ignores_foreign_nan=False,  # bulk copies take the whole last page, and 0 * NaN is NaN
    )

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self._fwd = import_module("flash_attn.cute.interface")._flash_attn_fwd

    @classmethod
    def unavailable(cls) -> str | None:
        """Say whether flash-attn-4 is installed, and not hidden by the older copy that version 2 ships."""
        hint = "pip install --pre flash-attn-4"
        return import_error("flash_attn.cute.interface", hint, distribution="flash-attn-4")

    @classmethod
    def refuse_pages(cls, spec: AttentionSpec) -> str | None:
        """Say whether the head dim is other than 64 and 128, for which pages of any size are read, 128 tokens fastest.

        Pages of other sizes are copied by tiles, which other head dims do not fill.
        """
        if spec.head_dim in (64, 128):
            return None
        return f"it reads pages for head dims [64, 128], not {spec.head_dim}"

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
        """Call ``_flash_attn_fwd``."""
        result: Tensor = self._fwd(
            q_RNH,
            keys,
            values,
            cu_seqlens_q=metadata.cu_new_lens,
            cu_seqlens_k=None if paged else metadata.cu_kv_lens,
            seqused_k=metadata.kv_lens if paged else None,
            page_table=metadata.page_table_BW if paged else None,
            max_seqlen_q=metadata.max_new_len,
            max_seqlen_k=metadata.max_kv_len,
            softmax_scale=self.spec.scale,
            causal=True,
            num_splits=1,
            out=out_RNH,
        )[0]
        return result
