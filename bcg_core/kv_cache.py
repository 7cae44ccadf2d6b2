"""A paged KV cache with one writer: the segment that computes keys and values.

Shape letters: T bucket (padded) tokens, L layers, P pages, S tokens a page, K KV heads, H head dim.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from bcg_core.allocation import allocating
from bcg_core.ambient import neutrally
from bcg_core.errors import KVCacheError
from bcg_core.kv_sequence import KVSequence
from bcg_core.page_holders import PageHolders
from bcg_core.spec import ModelSpec


class PagedKVCache:
    """Own keys and values of ``num_pages`` pages of ``page_size`` tokens for every layer.

    Storage starts as zeros, because kernels multiply masked value rows by 0 and 0 * NaN is NaN. Page 0 is reserved:
    padded rows of a bucket are written to its first slot. A flat slot number is ``page * page_size + offset``.

    Pages are counted: sequences may share one, none of them writes it then, and it is free when the last has given it
    back. Work on contents is queued on the current stream.

    Attributes:
        holders: who holds which page.
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
        self.holders = PageHolders(num_pages, page_size)
        self._keys: list[Tensor] = [layer[0] for layer in self.storage_L2PSKH]
        self._values: list[Tensor] = [layer[1] for layer in self.storage_L2PSKH]
        self._flat_keys = [keys.flatten(0, 1) for keys in self._keys]
        self._flat_values = [values.flatten(0, 1) for values in self._values]

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
        """Return how many pages no sequence holds and nobody has reserved."""
        return self.holders.free

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

    def owner_of(self, page: int) -> tuple[KVSequence, ...]:
        """Return the sequences that hold ``page``; empty for a free or reserved one.

        Pages that a sequence gives back during its own prefill have a stand-in for a holder until that ends.
        """
        if not 0 <= page < self.num_pages:
            raise KVCacheError(f"page {page} does not exist: there are {self.num_pages}, from 0 on")
        return self.holders.of(page)

    def extend(self, sequence: KVSequence, length: int) -> None:
        """Give ``sequence`` pages for ``length`` tokens in all; pages it has stay as they are.

        Raises KVCacheError, and takes nothing, when too few pages are free, and for a sequence of another cache.
        """
        self.holders.check(sequence)
        missing = -(-length // self.page_size) - len(sequence.pages)
        if missing > 0:
            what = f"{length} tokens need {missing} more pages of {self.page_size} tokens"
            self.holders.take(sequence, missing, what)

    def fork(self, sequence: KVSequence, tokens: int | None = None) -> KVSequence:
        """Return a new sequence that shares the first ``tokens`` cached tokens of ``sequence``; default is all of them.

        Nothing is copied and no page is taken until one of those who share a page is about to write to it, which
        ``PrefillBatch.from_chunks`` finds: see ``unshare``. Both may be freed in any order. Raises KVCacheError for
        more tokens than are cached and for a sequence of another cache.
        """
        self.holders.check(sequence)
        shared = sequence.cached if tokens is None else tokens
        if not 0 <= shared <= sequence.cached:
            raise KVCacheError(
                f"{shared} tokens cannot be shared, {sequence.cached} are cached: fork after the prefill of the others"
            )
        fork = KVSequence()
        self.holders.share(fork, sequence.pages[: -(-shared // self.page_size)])
        fork._cached = fork._written = shared
        return fork

    def unshare(self, sequence: KVSequence, start: int, stop: int) -> None:
        """Make ``sequence`` the only holder of its pages for tokens ``[start, stop)``, so that they can be written.

        Pages that others hold too are replaced, with a copy of what is written there. Raises KVCacheError, and takes
        nothing, when too few pages are free, and for tokens that ``extend`` gave no pages for.
        """
        self._check_pages(sequence, stop)
        held, size = sequence.pages, self.page_size
        with self.holders.lock:
            copies = self.holders.unshare(sequence, start // size, -(-stop // size))
            try:
                self.copy_pages(copies)
            except BaseException:
                self.holders.restore(sequence, held)
                raise

    def mark_written(self, sequence: KVSequence, tokens: int) -> None:
        """Count the first ``tokens`` tokens of ``sequence`` as cached, as the caller has written them to its pages.

        For a server that gets keys and values from elsewhere: ``extend`` first, ``unshare`` what a fork is to write.
        Raises KVCacheError for tokens without a page, and for tokens not cached so far whose page others hold too.
        """
        self._check_pages(sequence, tokens)
        last = -(-tokens // self.page_size)
        fresh = sequence.pages[sequence._written // self.page_size : last]
        if tokens > sequence._written and not self.holders.shared.isdisjoint(fresh):
            raise KVCacheError(
                f"tokens {sequence._written} to {tokens - 1} lie in pages that other sequences hold too: call unshare "
                "before writing them"
            )
        sequence._written = max(sequence._written, tokens)
        sequence._cached = tokens

    def _check_pages(self, sequence: KVSequence, tokens: int) -> None:
        self.holders.check(sequence)
        if not 0 <= tokens <= len(sequence.pages) * self.page_size:
            raise KVCacheError(
                f"the sequence has {len(sequence.pages)} pages of {self.page_size} tokens, not enough for {tokens}: "
                "call extend first"
            )

    def trim(self, sequence: KVSequence, pages: int) -> None:
        """Take back what ``sequence`` holds beyond its first ``pages`` pages.

        Contents stay until overwritten. Pages that others hold too stay theirs; pages of a sequence that is being
        prefilled are free when that ends. Raises KVCacheError for a sequence of another cache.
        """
        self.holders.check(sequence)
        self.holders.trim(sequence, pages)

    def free(self, sequence: KVSequence) -> None:
        """Take all pages of ``sequence`` back; it is as new afterwards. Errors as in ``trim``."""
        self.trim(sequence, 0)

    def reserve(self, pages: Sequence[int]) -> None:
        """Keep free ``pages`` from sequences, for page tables that the caller makes, and zero them.

        ``PrefillBatch.build`` without sequences takes reserved pages; in a cache that never gave a page to a sequence
        it takes all. Who reads and writes them is the caller's business, and so is ``clear`` where one of its requests
        leaves a page to another. Raises KVCacheError, and reserves nothing, unless all are free.
        """
        self.holders.reserve(pages)
        self.clear(pages)

    def unreserve(self, pages: Sequence[int]) -> None:
        """Give reserved ``pages`` to sequences again. Raises KVCacheError, and does nothing, for any other page."""
        self.holders.unreserve(pages)

    @torch.inference_mode()
    def clear(self, pages: Sequence[int]) -> None:
        """Zero ``pages`` in all layers.

        Backends without ``ignores_foreign_nan`` need it where a page changes hands that sequences know nothing of.
        Raises KVCacheError, and zeroes nothing, for a page that does not exist or that a sequence holds.
        """
        wrong = [page for page in pages if not 0 <= page < self.num_pages or self.owner_of(page)]
        if wrong:
            raise KVCacheError(
                f"pages {wrong} cannot be cleared: they must be among 0 to {self.num_pages - 1}, and no sequence's"
            )
        self.storage_L2PSKH.index_fill_(2, self._indices(pages), 0)
        self.holders.unclean.difference_update(pages)

    @torch.inference_mode()
    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zero flat ``slots`` in all layers, in one kernel."""
        self.storage_L2PSKH.flatten(2, 3).index_fill_(2, self._indices(slots), 0)

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the contents of pages to others, in all layers; ``copies`` are pairs of from and to."""
        if copies:
            old, new = (self._indices(pages) for pages in zip(*copies, strict=True))
            self.storage_L2PSKH.index_copy_(2, new, self.storage_L2PSKH.index_select(2, old))

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return host.to(self.device, non_blocking=True)
