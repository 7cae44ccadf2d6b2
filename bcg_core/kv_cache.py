"""A paged KV cache with one writer: the segment that computes keys and values.

Shape letters: T bucket (padded) tokens, L layers, P pages, S tokens a page, K KV heads, H head dim.
"""

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from bcg_core.allocation import allocating
from bcg_core.ambient import neutrally
from bcg_core.errors import KVCacheError
from bcg_core.spec import ModelSpec


@dataclass(kw_only=True, eq=False)
class KVSequence:
    """Track one request's pages across prefill chunks.

    Attributes:
        pages: page numbers in order; token t lives in page ``pages[t // S]``.
        cached: tokens whose keys and values a finished forward has written.
    """

    pages: list[int] = field(default_factory=list)
    cached: int = 0


class PagedKVCache:
    """Own keys and values of ``num_pages`` pages of ``page_size`` tokens for every layer.

    Storage starts as zeros, because kernels multiply masked value rows by 0 and 0 * NaN is NaN. Page 0 is reserved:
    padded rows of a bucket are written to its first slot. A flat slot number is ``page * page_size + offset``.
    """

    @neutrally("PagedKVCache")
    def __init__(self, spec: ModelSpec, *, num_pages: int, page_size: int = 16) -> None:
        if page_size < 1 or num_pages < 2:
            raise KVCacheError(
                f"a KV cache of {num_pages} pages of {page_size} tokens holds nothing: "
                "page_size must be at least 1 and num_pages at least 2 (page 0 is reserved)"
            )
        shape = (spec.num_layers, 2, num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        page_bytes = prod(shape) // num_pages * spec.dtype.itemsize
        with allocating("a KV cache", num_pages, "pages", page_bytes, spec.device, KVCacheError):
            self.storage_L2PSKH = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self._keys: list[Tensor] = [layer[0] for layer in self.storage_L2PSKH]
        self._values: list[Tensor] = [layer[1] for layer in self.storage_L2PSKH]
        self._flat_keys = [keys.flatten(0, 1) for keys in self._keys]
        self._flat_values = [values.flatten(0, 1) for values in self._values]
        self._free = list(range(num_pages - 1, 0, -1))
        self._given: set[int] = set()

    @property
    def device(self) -> torch.device:
        """Return where the cache lives."""
        return self.storage_L2PSKH.device

    @property
    def num_slots(self) -> int:
        """Return P * S, the number of flat slots, page 0 included."""
        return self.num_pages * self.page_size

    @property
    def free_pages(self) -> int:
        """Return how many pages no sequence holds."""
        return len(self._free)

    def keys(self, layer: int) -> Tensor:
        """Return the keys of ``layer``, ``[P, S, K, H]``, contiguous; a view, not a copy."""
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        """Return the values of ``layer``, ``[P, S, K, H]``, contiguous; a view, not a copy."""
        return self._values[layer]

    def flat(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``layer`` by flat slot, each ``[P * S, K, H]``; views."""
        return self._flat_keys[layer], self._flat_values[layer]

    def write(self, layer: int, k_TKH: Tensor, v_TKH: Tensor, slot_mapping_T: Tensor) -> None:
        """Write T rows of keys and values to the flat slots ``slot_mapping_T`` (int64); capturable."""
        self._flat_keys[layer].index_copy_(0, slot_mapping_T, k_TKH)
        self._flat_values[layer].index_copy_(0, slot_mapping_T, v_TKH)

    def extend(self, sequence: KVSequence, length: int) -> None:
        """Give ``sequence`` pages for ``length`` tokens in all; pages it has stay as they are.

        Raises KVCacheError, and takes nothing, when too few pages are free.
        """
        missing = -(-length // self.page_size) - len(sequence.pages)
        if missing > len(self._free):
            raise KVCacheError(
                f"{length} tokens need {missing} more pages of {self.page_size} tokens, "
                f"{len(self._free)} of {self.num_pages - 1} are free: free a sequence or make the cache larger"
            )
        for _ in range(missing):
            page = self._free.pop()
            self._given.add(page)
            sequence.pages.append(page)

    def trim(self, sequence: KVSequence, pages: int) -> None:
        """Take back what ``sequence`` holds beyond its first ``pages`` pages.

        Contents stay until overwritten. Raises KVCacheError, and takes nothing, for a page that nobody was given.
        """
        taken = sequence.pages[pages:]
        if not self._given.issuperset(taken) or len(set(taken)) < len(taken):
            strange = [page for page in taken if page not in self._given] or sorted(taken)
            raise KVCacheError(
                f"pages {strange} cannot be taken back: each must have been given out by this KV cache, and comes back "
                "once"
            )
        self._given.difference_update(taken)
        self._free.extend(reversed(taken))
        sequence.pages = sequence.pages[:pages]
        sequence.cached = min(sequence.cached, pages * self.page_size)

    def free(self, sequence: KVSequence) -> None:
        """Take all pages of ``sequence`` back; it is empty afterwards. Errors as in ``trim``."""
        self.trim(sequence, 0)
