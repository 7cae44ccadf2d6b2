"""A batch as transformers takes it.

Shape letters: B requests, S new tokens of the longest request, P cached tokens of the longest prefix, R new tokens of
all requests, K KV heads, H head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bcg_core import PagedKVCache, PrefillBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformersBatch:
    """Hold the inputs of one forward in transformers, on the device.

    Attributes:
        input_ids_BS: int64; ``[1, R]`` when packed.
        last_B: int64, row of each request's last token among all rows.
        further: what else the forward is called with.
    """

    input_ids_BS: Tensor
    last_B: Tensor
    further: dict[str, Any]

    @classmethod
    def padded(cls, batch: PrefillBatch) -> "TransformersBatch":
        """Lay out one row a request, padded on the right; cached prefixes are padded on the left.

        Where all prefixes are equally long, neither mask nor positions are needed: padding behind a request's last
        token is not seen by the tokens before it. So the fastest causal kernels apply.
        """
        new_B, prefix_B = torch.tensor([batch.new_lens, batch.prefix_lens])
        columns_S = torch.arange(batch.max_new_len)
        real_BS = columns_S < new_B[:, None]
        ids_BS = torch.zeros(real_BS.shape, dtype=torch.int64)
        ids_BS[real_BS] = batch.input_ids_R
        last_B = torch.arange(batch.num_requests) * batch.max_new_len + new_B - 1
        packed = torch.cat([ids_BS.flatten(), last_B]).to(batch.device, non_blocking=True)
        ids, last_B = packed.split([ids_BS.numel(), len(last_B)])
        further: dict[str, Any] = {}
        prefix = max(batch.prefix_lens)
        if min(batch.prefix_lens) < prefix:
            positions_BS = prefix_B[:, None] + columns_S
            mask_BX = torch.arange(prefix + batch.max_new_len) >= (prefix - prefix_B)[:, None]
            further = {
                "position_ids": positions_BS.to(batch.device, non_blocking=True),
                "attention_mask": mask_BX.long().to(batch.device, non_blocking=True),
            }
        return cls(input_ids_BS=ids.view(real_BS.shape), last_B=last_B, further=further)

    @classmethod
    def packed(cls, batch: PrefillBatch) -> "TransformersBatch":
        """Lay out all requests behind each other, without padding; for flash attention, and without prefixes."""
        last_B = torch.tensor(batch.cu_new_lens[1:]) - 1
        packed = torch.cat([batch.input_ids_R, batch.positions_R, last_B])
        ids_R, positions_R, last_B = packed.to(batch.device, non_blocking=True).split(
            [batch.num_tokens, batch.num_tokens, batch.num_requests]
        )
        offsets = torch.tensor(batch.cu_new_lens, dtype=torch.int32).to(
            batch.device, non_blocking=True
        )
        return cls(
            input_ids_BS=ids_R[None],
            last_B=last_B,
            further={
                "position_ids": positions_R[None],
                "cu_seq_lens_q": offsets,
                "cu_seq_lens_k": offsets,
                "max_length_q": batch.max_new_len,
                "max_length_k": batch.max_new_len,
            },
        )


def cached_prefixes(batch: PrefillBatch, kv_cache: PagedKVCache) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of all prefixes, layer by layer, ``[B, K, P, H]``; zeros in front of shorter ones.

    Keys are rotated here as there, so they are copied as they are. Empty without any prefix.
    """
    prefix = max(batch.prefix_lens)
    if not prefix:
        return []
    slots_BP = torch.zeros(batch.num_requests, prefix, dtype=torch.int64, device=batch.device)
    for row, (start, length) in enumerate(zip(batch.cu_kv_lens, batch.prefix_lens, strict=False)):
        slots_BP[row, prefix - length :] = batch.kv_slots[start : start + length]
    missing_B = prefix - torch.tensor(batch.prefix_lens)
    missing_BP = (torch.arange(prefix) < missing_B[:, None]).to(batch.device)

    def gathered(rows_SKH: Tensor) -> Tensor:
        rows_BPKH = rows_SKH[slots_BP].masked_fill(missing_BP[:, :, None, None], 0)
        return rows_BPKH.transpose(1, 2).contiguous()

    layers = range(kv_cache.storage_L2PSKH.shape[0])
    return [(gathered(keys), gathered(values)) for keys, values in map(kv_cache.flat, layers)]
