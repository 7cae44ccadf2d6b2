"""Backends that do in a break what would be a fault in a segment: no fault, as breaks are ordinary Python.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import PagedKVCache
from bcg_harness.testing.mask_backend import MaskBackend


class AllocatesAtReplay(MaskBackend):
    """Allocate new memory at every call, and free that of the call before."""

    name: ClassVar[str] = "allocates-at-replay"
    _calls = 0
    _workspace: Tensor | None = None

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Tensor,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend beside a workspace of another size each time."""
        self._calls += 1
        self._workspace = torch.full((self._calls % 7 + 1, 64), float("nan"), device=self.device)
        return super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)


class ReadsOnHost(MaskBackend):
    """Wait for the device in every layer, and branch on what it says: slow, which is for a benchmark to find."""

    name: ClassVar[str] = "reads-on-host"

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Tensor,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Look at the queries before attending."""
        if not bool(q_RNH.isfinite().all()):
            raise FloatingPointError("queries are not finite")
        return super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
