"""Batches that stand for what a runner will serve, for the warm-up of a backend."""

from collections.abc import Iterable

from bcg_core.batch import PrefillBatch
from bcg_core.kv_cache import PagedKVCache
from bcg_core.spec import BackendLimits


def warm_up_batches(
    sizes: Iterable[int], limits: BackendLimits, kv_cache: PagedKVCache, *, cached_prefix: bool
) -> list[PrefillBatch]:
    """Return scratch batches of the buckets ``sizes``, largest first, within ``limits``.

    Kernels differ behind a prefix: with ``cached_prefix`` there is a batch without and one with a prefix of each
    bucket. A bucket that no batch can fill gets the largest batch there can be.
    """
    prefixes = {0, min(kv_cache.page_size, limits.max_context - 1) if cached_prefix else 0}
    batches = []
    for size in sorted(sizes, reverse=True):
        for prefix in sorted(prefixes):
            longest = limits.max_context - prefix
            tokens = min(size, longest * limits.max_requests)
            batches.append(
                PrefillBatch.scratch(_split(tokens, longest), kv_cache, prefix_len=prefix)
            )
    return batches


def _split(tokens: int, longest: int) -> list[int]:
    """Split ``tokens`` into requests of at most ``longest``."""
    full, rest = divmod(tokens, longest)
    return [longest] * full + [rest] * (rest > 0)
