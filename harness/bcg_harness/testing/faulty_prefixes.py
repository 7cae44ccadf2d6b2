"""Backends that are right but behind some prefixes: at the ends of pages, in large batches, beside others, far away.

Shape letters: S slots of the KV cache.
"""

from typing import ClassVar

import torch
from torch import Tensor

from bcg_core import PrefillBatch
from bcg_harness.testing.mask_backend import MaskBackend


class LosesFullPageBehindPrefix(MaskBackend):
    """Lose the last page of a request that goes on behind a prefix and ends exactly where a page does."""

    name: ClassVar[str] = "loses-full-page-behind-prefix"

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Leave the last page out, but for each token itself."""
        visible, length = super().visible_slots(batch, request), batch.kv_lens[request]
        if not batch.prefix_lens[request] or length % batch.page_size:
            return visible
        whole = length - batch.page_size
        return [
            torch.cat([slots_S[: min(whole, len(slots_S) - 1)], slots_S[-1:]])
            for slots_S in visible
        ]


class LosesLastPageOfFullPrefix(MaskBackend):
    """Lose the last page of a prefix that ends exactly where a page does."""

    name: ClassVar[str] = "loses-last-page-of-full-prefix"

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Leave that page out."""
        visible, prefix = super().visible_slots(batch, request), batch.prefix_lens[request]
        if not prefix or prefix % batch.page_size:
            return visible
        return [
            torch.cat([slots_S[: prefix - batch.page_size], slots_S[prefix:]])
            for slots_S in visible
        ]


class _ForgetsPrefix(MaskBackend):
    """Attend to new tokens only, where ``forgets`` says so."""

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Leave the cached tokens out."""
        visible, prefix = super().visible_slots(batch, request), batch.prefix_lens[request]
        return (
            [slots_S[prefix:] for slots_S in visible] if self.forgets(batch, request) else visible
        )

    def forgets(self, batch: PrefillBatch, request: int) -> bool:
        """Tell whether the prefix of ``request`` is forgotten."""
        raise NotImplementedError


class ForgetsPrefixFromFifthOn(_ForgetsPrefix):
    """Serve the prefixes of the first four requests of a batch."""

    name: ClassVar[str] = "forgets-prefix-from-fifth-on"
    served: ClassVar[int] = 4

    def forgets(self, batch: PrefillBatch, request: int) -> bool:
        """Count requests."""
        return request >= self.served


class ForgetsPrefixFromSeventeenthOn(ForgetsPrefixFromFifthOn):
    """Serve the prefixes of the first sixteen requests of a batch."""

    name: ClassVar[str] = "forgets-prefix-from-seventeenth-on"
    served: ClassVar[int] = 16


class ForgetsPrefixOfDecodeRows(_ForgetsPrefix):
    """Forget the prefix of one new token beside longer requests, for which one alone has a kernel of its own."""

    name: ClassVar[str] = "forgets-prefix-of-decode-rows"

    def forgets(self, batch: PrefillBatch, request: int) -> bool:
        """Look for one token among more."""
        return batch.new_lens[request] == 1 < batch.max_new_len


class DropsFarKeys(MaskBackend):
    """Read the first 1500 keys of a request, as from a workspace that holds no more."""

    name: ClassVar[str] = "drops-far-keys"

    def visible_slots(self, batch: PrefillBatch, request: int) -> list[Tensor]:
        """Cut what is longer."""
        return [slots_S[:1500] for slots_S in super().visible_slots(batch, request)]
