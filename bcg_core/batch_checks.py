"""What a batch must satisfy before anything is launched for it; every error names the request.

Shape letters: B requests, R real (new) tokens, W pages of the longest request.
"""

from array import array
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from bcg_core.errors import BatchError
from bcg_core.kv_cache import PagedKVCache
from bcg_core.kv_sequence import KVSequence

_INDEX_TYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def integer(value: Any, what: str) -> int:
    """Return ``value`` as an int of 64 bits; refuses everything that is no integer, naming it as ``what``."""
    try:
        number = index(value)
    except TypeError as error:
        raise BatchError(f"{what} is {value!r}, but must be an integer") from error
    if not -(2**63) <= number < 2**63:
        raise BatchError(f"{what} is {value!r}, which does not fit 64 bits")
    return number


def integers(values: Sequence[int] | Tensor, what: str) -> tuple[int, ...]:
    """Return ``values`` as ints, one a request; refuses everything that is no integer, naming the request."""
    given: Any = values
    if isinstance(values, Tensor):
        given = index_tensor(values, what).tolist()
    try:
        items = enumerate(given)
    except TypeError as error:
        raise BatchError(f"{what} is {values!r}, but must be integers, one a request") from error
    return tuple(integer(value, f"request {number}: {what}") for number, value in items)


def index_tensor(values: Sequence[int] | Tensor, what: str) -> Tensor:
    """Return ``values`` as one row of int64 that shares no memory; refuses other shapes and what is no integer."""
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.dtype not in _INDEX_TYPES:
            raise BatchError(
                f"{what} must be one row of integers, not {tuple(values.shape)} of {values.dtype}"
            )
        return values.to(torch.int64, copy=True)
    try:
        # Not torch.tensor, which cuts floats off. By their iterator, bytes are numbers too.
        row = array("q", values if isinstance(values, list | tuple) else iter(values))
    except (TypeError, OverflowError) as error:
        raise BatchError(f"{what} must be one row of integers of 64 bits: {error}") from error
    if not row:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(row, dtype=torch.int64)


def check_sequences(
    sequences: Sequence[KVSequence],
    prefix_lens: Sequence[int],
    kv_cache: PagedKVCache,
) -> None:
    """Refuse a sequence that is there twice or of another cache, and a prefix that is not cached."""
    seen: set[KVSequence] = set()
    for number, (sequence, prefix) in enumerate(zip(sequences, prefix_lens, strict=True)):
        if sequence in seen:
            raise BatchError(f"request {number}: its sequence is in the batch twice")
        seen.add(sequence)
        if not kv_cache.holders.admits(sequence):
            raise BatchError(
                f"request {number}: its sequence holds pages of another KV cache than the batch is made for; free it "
                "there, and prefill it here from its first token"
            )
        if not 0 <= prefix <= sequence.cached:
            raise BatchError(
                f"request {number}: a prefix of {prefix} tokens was asked for, {sequence.cached} are cached"
            )


def check_pages(
    sequences: Sequence[KVSequence],
    pages: Sequence[tuple[int, ...]],
    prefix_lens: Sequence[int],
    kv_cache: PagedKVCache,
) -> None:
    """Refuse ``pages`` that are not those of the requests' sequences, and a write to pages that others hold too.

    Without sequences: a write to pages that sequences hold, and pages that a sequence can get any time.
    """
    if not sequences:
        check_unheld(pages, prefix_lens, kv_cache)
        return
    for number, (sequence, used) in enumerate(zip(sequences, pages, strict=True)):
        held = sequence._pages
        if held is not used and held[: len(used)] != used:
            raise BatchError(f"request {number}: its page table is not that of its sequence")
    check_written_alone(pages, prefix_lens, kv_cache)


def check_written_alone(
    pages: Sequence[tuple[int, ...]], prefix_lens: Sequence[int], kv_cache: PagedKVCache
) -> None:
    """Refuse a write to pages of a sequence that others hold too."""
    shared = kv_cache.holders.shared
    if not shared:
        return
    for number, (used, prefix) in enumerate(zip(pages, prefix_lens, strict=True)):
        for page in used[prefix // kv_cache.page_size :]:
            if page in shared:
                raise BatchError(
                    f"request {number}: it writes page {page}, which another sequence holds too: "
                    "PrefillBatch.from_chunks makes a copy of its own"
                )


def check_unheld(
    pages: Sequence[tuple[int, ...]], prefix_lens: Sequence[int], kv_cache: PagedKVCache
) -> None:
    """Refuse pages of no sequence that a sequence can get any time, and a write to pages that sequences hold."""
    holders = kv_cache.holders
    if not holders.managed:
        return
    for number, (used, prefix) in enumerate(zip(pages, prefix_lens, strict=True)):
        first_written = prefix // kv_cache.page_size
        for index_in_table, page in enumerate(used):
            if page in holders.reserved:
                continue
            if not holders.of(page):
                raise BatchError(
                    f"request {number}: page {page} is free, so a sequence may get it any time: take it out of the "
                    "pool with PagedKVCache.reserve, or use PrefillBatch.from_chunks"
                )
            if index_in_table >= first_written:
                raise BatchError(
                    f"request {number}: it writes page {page}, which a sequence holds: give the sequences to build, or "
                    "use PrefillBatch.from_chunks"
                )


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


def needed_pages(
    page_table: Sequence[Sequence[int]],
    new_lens: Sequence[int],
    prefix_lens: Sequence[int],
    kv_cache: PagedKVCache,
) -> tuple[tuple[int, ...], ...]:
    """Return the pages that each request needs.

    Refuses requests whose pages are too few, not among those of the cache, or there twice.
    """
    rows: list[tuple[int, ...]] = []
    for number, (pages, new, prefix) in enumerate(
        zip(page_table, new_lens, prefix_lens, strict=True)
    ):
        need = -(-(prefix + new) // kv_cache.page_size)
        given: Any = pages
        listed = index_tensor(given, f"request {number}: page table")
        if len(listed) < need:
            raise BatchError(
                f"request {number}: {prefix + new} tokens need {need} pages of {kv_cache.page_size} tokens, "
                f"its page table has {len(listed)}"
            )
        row = tuple(listed[:need].tolist() if isinstance(given, Tensor) else given[:need])
        _check_pages(number, row, kv_cache)
        rows.append(row)
    return tuple(rows)


def pack_page_table(pages: Sequence[tuple[int, ...]]) -> Tensor:
    """Return ``pages`` of each request as ``[B, W]`` int32, padded with page 0."""
    width = max(map(len, pages), default=0)
    padded = [[*row, *[0] * (width - len(row))] for row in pages]
    table_BW = torch.tensor(padded, dtype=torch.int32, device="cpu")
    return table_BW.reshape(len(pages), width)


def _check_pages(number: int, pages: Sequence[int], kv_cache: PagedKVCache) -> None:
    if min(pages) < 1 or max(pages) >= kv_cache.num_pages:
        wrong = next(page for page in pages if not 1 <= page < kv_cache.num_pages)
        raise BatchError(
            f"request {number}: page {wrong} is not among pages 1 to {kv_cache.num_pages - 1} of the KV cache "
            "(page 0 is reserved for padding)"
        )
    if len(set(pages)) < len(pages):
        twice = next(page for page in pages if pages.count(page) > 1)
        raise BatchError(f"request {number}: page {twice} is in its page table twice")


def check_slots(slots_R: Tensor, owners_R: Tensor) -> None:
    """Refuse slots that two requests write."""
    sorted_R, order_R = slots_R.sort(stable=True)
    repeated = (sorted_R[1:] == sorted_R[:-1]).nonzero()
    if len(repeated):
        position = int(repeated[0])
        earlier, later = int(order_R[position]), int(order_R[position + 1])
        raise BatchError(
            f"request {int(owners_R[later])}: slot {int(slots_R[later])} is used twice, "
            f"request {int(owners_R[earlier])} writes it too"
        )
