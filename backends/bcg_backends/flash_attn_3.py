"""FlashAttention 3, through the operator that writes ``out`` and reads page tables.

Shape letters: R real tokens, S keys of all requests, B requests, W pages, N query heads, K KV heads, H head dim.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from bcg_backends.flash_attn import FlashAttentionBackend
from bcg_backends.varlen import VarlenMetadata, refuse_page_size
from bcg_backends.vendor import import_error
from bcg_core import AttentionSpec, BackendLimits


class FlashAttention3(FlashAttentionBackend):
    """FlashAttention 3 (Hopper only), through its torch operator; from ``flash_attn_interface`` or ``fa3_fwd``.

    Builds read pages by bulk tensor copies alone, so pages must be multiples of the kernel's key block, and a launch
    must be told of more than one query block: a larger maximum than the batch has is legal. One split keeps results
    independent of the batch they are in.
    """

    name = "flash_attn_3"
    capabilities = replace(
        FlashAttentionBackend.capabilities,
        head_dims=frozenset({64, 96, 128, 192, 256}),
        min_compute_capability=(9, 0),
        preferred_page_multiple=128,
        ignores_foreign_nan=False,  # bulk copies take the whole last page, and 0 * NaN is NaN
    )
    libraries: ClassVar[Mapping[str, str]] = {
        "flash_attn_interface": "flash_attn_3",
        "fa3_fwd_interface": "fa3_fwd",
    }
    """Module to import, and namespace of the operator that it registers."""
    query_blocks: ClassVar[Mapping[int, int]] = {64: 192, 128: 128}
    key_blocks: ClassVar[Mapping[int, int]] = {64: 128, 128: 128}

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        module = next(name for name in self.libraries if import_error(name, "") is None)
        import_module(module)
        self._fwd = getattr(torch.ops, self.libraries[module]).fwd.default
        self._least_new_len = self.query_blocks.get(spec.head_dim, 0) // spec.group_size + 1

    @classmethod
    def runs_on_this_gpu(cls) -> bool:
        """Tell whether the current GPU is of the Hopper family, later ones excluded; True where there is none."""
        return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9

    @classmethod
    def unavailable(cls) -> str | None:
        """Say whether one of the two packages of version 3 can be imported."""
        reasons = [import_error(module, "pip install fa3-fwd") for module in cls.libraries]
        if None in reasons:
            return None
        broken = [reason for reason in reasons if reason and "not installed" not in reason]
        return (broken or reasons)[-1]

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add what only some builds and GPUs have."""
        reason = super().unsupported(spec, device)
        if reason is not None:
            return reason
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
            return "min_compute_capability: runs on compute capability 9.x only"
        if spec.dtype == torch.float16 and import_error("flash_attn_interface", "") is not None:
            return "dtypes: fa3-fwd is built without float16; takes bfloat16"
        return None

    @classmethod
    def refuse_pages(cls, spec: AttentionSpec) -> str | None:
        """Say whether pages are other than multiples of the causal kernel's key block."""
        block = cls.key_blocks.get(spec.head_dim)
        if block is None:
            return f"it reads pages for head dims {sorted(cls.key_blocks)}, not {spec.head_dim}"
        return refuse_page_size(spec, block)

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
        """Call the operator."""
        result: Tensor = self._fwd(
            q_RNH,
            keys,
            values,
            None,  # k_new
            None,  # v_new
            None,  # q_v
            out_RNH,
            metadata.cu_new_lens,
            None if paged else metadata.cu_kv_lens,
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            metadata.kv_lens if paged else None,
            max(metadata.max_new_len, self._least_new_len, 2),
            metadata.max_kv_len,
            metadata.page_table_BW if paged else None,
            None,  # kv_batch_idx
            None,  # leftpad_k
            None,  # rotary_cos
            None,  # rotary_sin
            None,  # seqlens_rotary
            None,  # q_descale
            None,  # k_descale
            None,  # v_descale
            self.spec.scale,
            True,  # causal, bottom-right
            -1,
            -1,
            0,  # attention_chunk
            0.0,  # softcap
            False,  # rotary_interleaved
            None,  # scheduler_metadata: its size rule differs between releases
            1,  # num_splits
            None,  # pack_gqa
            0,  # sm_margin
        )[0]
        return result
