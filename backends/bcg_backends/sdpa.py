"""Attention through ``torch.nn.functional.scaled_dot_product_attention``, one call a request.

Shape letters: R real tokens, N query heads, K KV heads, H head dim, Q new tokens and S keys of one request.

Needs nothing but torch and runs on CPU and CUDA, so it is the backend that is always there. Its cost grows with the
number of requests.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bcg_backends.vendor import refuse_head_dim
from bcg_core import AttentionBackend, AttentionSpec, Capabilities, PagedKVCache, PrefillBatch


@dataclass(frozen=True, kw_only=True)
class RequestRows:
    """Say where one request's rows are.

    Attributes:
        new: its rows among the R new tokens.
        slots_S: int64 on the device, flat slots of all its keys; None when nothing is cached before the new tokens,
            whose keys and values can then be read in place.
        mask: what its new tokens see of its keys; None where it is square. Made once a batch: torch 2.11 and 2.13
            cannot make one below a dispatch mode, as the debug tools are, and it would cost each layer host time.
    """

    new: slice
    slots_S: Tensor | None = None
    mask: Tensor | None = None


class SDPABackend(AttentionBackend):
    """Serve any head layout on CPU and CUDA with torch alone.

    ``is_causal`` aligns the mask top-left, which is wrong behind a prefix; requests with one use torch's lower-right
    causal bias instead. The kernel is pinned, whatever ``sdpa_kernel`` the caller is in. On CUDA also because cuDNN,
    torch's default on recent GPUs, plans anew for every length, and the math fallback materialises all logits: 16-bit
    types use the flash kernel; float32 has only the memory-efficient one, which knows no grouped heads, so keys and
    values are repeated for it.
    """

    name = "sdpa"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        devices=frozenset({"cpu", "cuda"}),
        gqa=True,
        cached_prefix=True,
        ignores_foreign_nan=True,
        needs_host_plan=False,
        deterministic=True,
    )

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add to the declared limits what torch's CUDA kernels need of the head dim."""
        reason = super().unsupported(spec, device)
        return refuse_head_dim(spec) if reason is None and device.type == "cuda" else reason

    def init_forward_metadata(self, batch: PrefillBatch) -> list[RequestRows]:
        """List the requests' rows, and the slots of those behind a prefix."""
        new = [slice(*bounds) for bounds in pairwise(batch.cu_new_lens)]
        keys = [slice(*bounds) for bounds in pairwise(batch.cu_kv_lens)]
        return [
            RequestRows(
                new=rows,
                slots_S=batch.kv_slots[slots],
                mask=causal_lower_right(rows.stop - rows.start, slots.stop - slots.start),
            )
            if prefix
            else RequestRows(new=rows)
            for rows, slots, prefix in zip(new, keys, batch.prefix_lens, strict=True)
        ]

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: list[RequestRows],
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend request by request; returns a new tensor, which the core copies."""
        keys, values = kv_cache.flat(layer)
        outputs = []
        with self._kernel():
            for request in metadata:
                if request.slots_S is None:
                    k_SKH, v_SKH = k_RKH[request.new], v_RKH[request.new]
                else:
                    k_SKH = keys.index_select(0, request.slots_S)
                    v_SKH = values.index_select(0, request.slots_S)
                outputs.append(self._attend(q_RNH[request.new], k_SKH, v_SKH, request.mask))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _kernel(self) -> AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
        if self._repeats_kv:
            return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)

    @property
    def _repeats_kv(self) -> bool:
        return self.device.type == "cuda" and self.spec.dtype == torch.float32

    def _attend(self, q_QNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, mask: Tensor | None) -> Tensor:
        if self._repeats_kv and self.spec.group_size > 1:
            k_SKH = k_SKH.repeat_interleave(self.spec.group_size, dim=1)
            v_SKH = v_SKH.repeat_interleave(self.spec.group_size, dim=1)
        output = F.scaled_dot_product_attention(
            q_QNH.transpose(0, 1)[None],
            k_SKH.transpose(0, 1)[None],
            v_SKH.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.spec.scale,
            enable_gqa=q_QNH.shape[1] != k_SKH.shape[1],
        )
        return output[0].transpose(0, 1)
