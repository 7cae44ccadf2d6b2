"""Backends that do in a break what would be a fault in a segment: no fault, as breaks are ordinary Python.

Shape letters: R real tokens, N query heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import Capabilities, PrefillBatch
from bcg_harness.testing.mask_backend import LayerCall, MaskBackend


class AllocatesAtReplay(MaskBackend):
    """Allocate new memory at every call, and free that of the call before."""

    name: ClassVar[str] = "allocates-at-replay"
    _calls = 0
    _workspace: Tensor | None = None

    def attend(self, call: LayerCall) -> Tensor:
        """Attend beside a workspace of another size each time."""
        self._calls += 1
        self._workspace = torch.full((self._calls % 7 + 1, 64), float("nan"), device=self.device)
        return super().attend(call)


class ReadsOnHost(MaskBackend):
    """Wait for the device in every layer, and branch on what it says: slow, which is for a benchmark to find."""

    name: ClassVar[str] = "reads-on-host"
    capabilities: ClassVar[Capabilities] = replace(
        MaskBackend.capabilities, supports_full_graph=False
    )

    def attend(self, call: LayerCall) -> Tensor:
        """Look at the queries before attending."""
        if not bool(call.q_RNH.isfinite().all()):
            raise FloatingPointError("queries are not finite")
        return super().attend(call)


class WarmsUpLate(MaskBackend):
    """Skip the warm-up, and make what is lazy at the first call: the first replay is slow, and right."""

    name: ClassVar[str] = "warms-up-late"
    _lazy: Tensor | None = None

    def warm_up(self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]) -> None:
        """Leave it to the first batch."""

    def attend(self, call: LayerCall) -> Tensor:
        """Allocate and wait, once, then attend."""
        if self._lazy is None:
            self._lazy = torch.tensor(self.spec.scale, dtype=torch.float64, device=self.device)
            self.scale = self._lazy.item()
        return super().attend(call)
