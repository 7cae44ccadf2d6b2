"""Sequences whose tokens count as cached, whatever their pages hold."""

from collections.abc import Sequence

from bcg_core import KVSequence, PagedKVCache


def sequence_on(kv_cache: PagedKVCache, pages: Sequence[int], *, cached: int = 0) -> KVSequence:
    """Return a sequence that holds just ``pages``, in this order, the first ``cached`` tokens cached.

    The pages must be free; the others are given in ascending order afterwards.
    """
    singles = [KVSequence() for _ in range(kv_cache.free_pages)]
    for single in singles:
        kv_cache.extend(single, 1)
    by_page = {single.pages[0]: single for single in singles}
    others = sorted(set(by_page).difference(pages), reverse=True)
    for page in [*others, *reversed(pages)]:  # what is freed last is given first
        kv_cache.free(by_page[page])
    sequence = KVSequence()
    kv_cache.extend(sequence, len(pages) * kv_cache.page_size)
    kv_cache.mark_written(sequence, cached)
    return sequence


def written_sequence(kv_cache: PagedKVCache, tokens: int) -> KVSequence:
    """Return a sequence with pages for ``tokens`` tokens, all of them cached."""
    sequence = KVSequence()
    kv_cache.extend(sequence, tokens)
    kv_cache.mark_written(sequence, tokens)
    return sequence
