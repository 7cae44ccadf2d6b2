"""A batch's index arrays on the device.

Shape letters: B requests, R real (new) tokens, W pages of the longest request.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bcg_core.batch import PrefillBatch


@dataclass(frozen=True, kw_only=True)
class DeviceIndices:
    """Hold a batch's index arrays on the device, int32 and contiguous; read-only, owned by the batch.

    Attributes:
        cu_new_lens: B + 1 offsets of new tokens.
        cu_kv_lens: B + 1 offsets of keys.
        kv_lens: B key counts.
        page_table_BW: pages of each request.
    """

    cu_new_lens: Tensor
    cu_kv_lens: Tensor
    kv_lens: Tensor
    page_table_BW: Tensor

    @classmethod
    def of(cls, batch: "PrefillBatch") -> "DeviceIndices":
        """Copy the index arrays of ``batch`` to its device, in the order of the current stream, without waiting."""
        host = [
            torch.tensor(batch.cu_new_lens, dtype=torch.int32, device="cpu"),
            torch.tensor(batch.cu_kv_lens, dtype=torch.int32, device="cpu"),
            torch.tensor(batch.kv_lens, dtype=torch.int32, device="cpu"),
            batch.page_table_BW.flatten(),
        ]
        packed = torch.cat([_aligned(part) for part in host]).to(batch.device, non_blocking=True)
        offsets = accumulate((_aligned(part).numel() for part in host), initial=0)
        cu_new, cu_kv, kv, pages = (
            packed[offset : offset + part.numel()]
            for offset, part in zip(offsets, host, strict=False)
        )
        return cls(
            cu_new_lens=cu_new,
            cu_kv_lens=cu_kv,
            kv_lens=kv,
            page_table_BW=pages.view(batch.page_table_BW.shape),
        )


def _aligned(indices: Tensor, elements: int = 4) -> Tensor:
    """Pad to a multiple of 16 bytes, so that every array of a packed transfer starts aligned."""
    return torch.nn.functional.pad(indices, (0, -indices.numel() % elements))


def flat_slots(page_table_BW: Tensor, owners: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return the int64 flat slot of each (request, position)."""
    pages = page_table_BW[owners, positions // size].to(torch.int64)
    return pages * size + positions % size
