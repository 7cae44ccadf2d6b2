"""Writes to KV slots that are somebody else's.

Shape letters: L layers, P pages, S tokens a page, Z slots (P * S), K KV heads, H head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bcg_core.debug.tool import Tool
from bcg_core.errors import StrayWriteError

if TYPE_CHECKING:
    from bcg_core.batch import PrefillBatch
    from bcg_core.kv_cache import PagedKVCache
    from bcg_core.runner import PrefillRunner

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 8
"""Slots that a message lists."""


class KVWriteGuard(Tool):
    """Refuse a replay that changed KV slots other than the batch's own and those of page 0, which is nobody's.

    Keeps one 8-byte checksum for each slot and layer, of keys and of values, and reads the whole cache twice. Costs the
    host a wait for the device.
    """

    @contextmanager
    def around_replay(
        self, runner: "PrefillRunner", batch: "PrefillBatch", padded: int
    ) -> Iterator[None]:
        """Compare the cache before the replay with the cache after it."""
        with self.watching(runner.kv_cache, batch):
            yield

    @contextmanager
    def watching(self, kv_cache: "PagedKVCache", batch: "PrefillBatch") -> Iterator[None]:
        """Compare the cache before the ``with`` block with the cache after it, whatever ran in between."""
        before_L2Z = checksums(kv_cache)
        yield
        changed_L2Z = checksums(kv_cache) != before_L2Z
        changed_L2Z[:, :, batch.slot_mapping_R.to(changed_L2Z.device)] = False
        changed_L2Z[:, :, : kv_cache.page_size] = False
        if not changed_L2Z.any():
            return
        layers = changed_L2Z.flatten(1).any(dim=1).nonzero().flatten().tolist()
        slots = changed_L2Z.flatten(0, 1).any(dim=0).nonzero().flatten().tolist()
        pages = sorted({slot // kv_cache.page_size for slot in slots})
        more = f" and {len(slots) - _SHOWN} more" if len(slots) > _SHOWN else ""
        raise StrayWriteError(
            f"KV slots {slots[:_SHOWN]}{more} changed, of pages {pages[:_SHOWN]} in layers {layers[:_SHOWN]}, and are "
            f"not among the {batch.num_tokens} slots of the batch: a segment writes to stale slots, or a backend "
            "writes to the cache"
        )


def checksums(kv_cache: "PagedKVCache") -> Tensor:
    """Return a number for the bits of each slot, ``[L, 2, Z]`` int64; another one after almost any change."""
    storage = kv_cache.storage_L2PSKH
    bits_L2ZX = storage.view(_INTEGERS[storage.itemsize]).flatten(2, 3).flatten(3)
    # Odd and different, so that no change of one element and no swap of two goes unseen; sums may wrap around.
    weights_X = torch.arange(bits_L2ZX.shape[3], device=storage.device) * 0x1E3779B97F4A7C16 + 1
    return torch.stack([(bits_2ZX * weights_X).sum(dim=2) for bits_2ZX in bits_L2ZX])
