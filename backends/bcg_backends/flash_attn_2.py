"""FlashAttention 2, through the entry that writes ``out`` and reads page tables.

Shape letters: R real tokens, S keys of all requests, B requests, W pages, N query heads, K KV heads, H head dim.
"""

from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from bcg_backends.flash_attn import FlashAttentionBackend
from bcg_backends.varlen import VarlenMetadata, refuse_page_size
from bcg_backends.vendor import import_error
from bcg_core import AttentionSpec, BackendLimits


class FlashAttention2(FlashAttentionBackend):
    """FlashAttention 2, through ``flash_attn_2_cuda.varlen_fwd``; reads pages of multiples of 256 tokens.

    With one new token a request and grouped heads, version 2 regroups the queries and leaves ``out`` unwritten
    (flash-attention issues 1537 and 1619); it is therefore never told of a maximum below 2.
    """

    name = "flash_attn_2"
    capabilities = replace(FlashAttentionBackend.capabilities, preferred_page_multiple=256)

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self._varlen_fwd = import_module("flash_attn_2_cuda").varlen_fwd

    @classmethod
    def unavailable(cls) -> str | None:
        """Say whether the extension of flash-attn 2 can be imported."""
        return import_error("flash_attn_2_cuda", "pip install flash-attn --no-build-isolation")

    @classmethod
    def refuse_pages(cls, spec: AttentionSpec) -> str | None:
        """Say whether pages are other than multiples of 256 tokens."""
        return refuse_page_size(spec, cls.capabilities.preferred_page_multiple)

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
        """Call ``varlen_fwd``."""
        result: Tensor = self._varlen_fwd(
            q_RNH,
            keys,
            values,
            out_RNH,
            metadata.cu_new_lens,
            metadata.cu_kv_lens,
            None,  # seqused_k: cu_kv_lens says it
            None,  # leftpad_k
            metadata.page_table_BW if paged else None,
            None,  # alibi_slopes
            max(metadata.max_new_len, 2),
            metadata.max_kv_len,
            0.0,  # dropout
            self.spec.scale,
            False,  # zero_tensors
            True,  # causal, bottom-right
            -1,
            -1,
            0.0,  # softcap
            False,  # return_softmax
            None,  # generator
        )[0]
        return result
