"""What a batch must satisfy before anything is launched for it; every error names the request.

Shape letters: B requests, R real (new) tokens, W pages of the longest request.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bcg_core.errors import BatchError
from bcg_core.kv_cache import PagedKVCache


def check_lengths(new_lens: Sequence[int], prefix_lens: Sequence[int], requests: int) -> None:
    """Refuse lengths that are not those of ``requests`` requests, empty requests and negative prefixes."""
    if not len(new_lens) == len(prefix_lens) == requests:
        raise BatchError(
            f"{len(new_lens)} new lengths, {len(prefix_lens)} prefix lengths and {requests} page lists "
            "do not describe the same requests"
        )
    for number, (new, prefix) in enumerate(zip(new_lens, prefix_lens, strict=True)):
        if new < 1:
            raise BatchError(
                f"request {number}: {new} new tokens; a request needs at least one, leave it out otherwise"
            )
        if prefix < 0:
            raise BatchError(f"request {number}: a prefix of {prefix} tokens is negative")


def pack_page_table(
    page_table: Sequence[Sequence[int]],
    new_lens: Sequence[int],
    prefix_lens: Sequence[int],
    kv_cache: PagedKVCache,
) -> Tensor:
    """Return ``[B, W]`` int32 with the pages each request needs, padded with page 0.

    Refuses requests whose pages are too few, or not among those of the cache.
    """
    lens = [prefix + new for prefix, new in zip(prefix_lens, new_lens, strict=True)]
    needed = [-(-length // kv_cache.page_size) for length in lens]
    width = max(needed, default=0)
    for number, (pages, need) in enumerate(zip(page_table, needed, strict=True)):
        if len(pages) < need:
            raise BatchError(
                f"request {number}: {lens[number]} tokens need {need} pages of {kv_cache.page_size} tokens, "
                f"its page table has {len(pages)}"
            )
    rows = [
        [*pages[:need], *[0] * (width - need)]
        for pages, need in zip(page_table, needed, strict=True)
    ]
    packed_BW = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
    used_BW = torch.arange(width) < torch.tensor(needed, dtype=torch.int64)[:, None]
    outside = (used_BW & ((packed_BW < 1) | (packed_BW >= kv_cache.num_pages))).nonzero()
    if len(outside):
        number, column = outside[0].tolist()
        raise BatchError(
            f"request {number}: page {int(packed_BW[number, column])} is not among pages 1 to "
            f"{kv_cache.num_pages - 1} of the KV cache (page 0 is reserved for padding)"
        )
    return packed_BW.to(torch.int32)


def check_slots(slots_R: Tensor, owners_R: Tensor, kv_cache: PagedKVCache) -> None:
    """Refuse slots that are too few, outside the cache, reserved, or written twice."""
    if len(slots_R) != len(owners_R):
        raise BatchError(f"{len(slots_R)} slots were given for {len(owners_R)} new tokens")
    first, last = kv_cache.page_size, kv_cache.num_slots - 1
    outside = ((slots_R < first) | (slots_R > last)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise BatchError(
            f"request {int(owners_R[row])}: slot {int(slots_R[row])} is not among slots {first} to {last} "
            "of the KV cache (page 0 is reserved for padding)"
        )
    sorted_R, order_R = slots_R.sort(stable=True)
    repeated = (sorted_R[1:] == sorted_R[:-1]).nonzero()
    if len(repeated):
        position = int(repeated[0])
        earlier, later = int(order_R[position]), int(order_R[position + 1])
        raise BatchError(
            f"request {int(owners_R[later])}: slot {int(slots_R[later])} is used twice, "
            f"request {int(owners_R[earlier])} writes it too"
        )
