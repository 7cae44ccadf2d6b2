"""A batch of prefill requests, validated once, on the host and on the device.

Shape letters: B requests, R real (new) tokens of all requests, W pages of the longest request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from bcg_core.ambient import neutrally
from bcg_core.batch_checks import (
    check_lengths,
    check_pages,
    check_sequences,
    check_slots,
    index_tensor,
    integer,
    integers,
    needed_pages,
    pack_page_table,
)
from bcg_core.device_indices import DeviceIndices, flat_slots
from bcg_core.errors import BatchError
from bcg_core.kv_cache import PagedKVCache
from bcg_core.kv_sequence import KVSequence


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Ask to prefill some more tokens of one request.

    Attributes:
        token_ids: the new tokens, at least one; a tensor must be on the host.
        sequence: the request's place in the cache; tokens already cached there are its prefix.
        prefix_len: tokens before the new ones; default is all that is cached. Fewer means to recompute from there; what
            was cached behind the new tokens is gone then.
    """

    token_ids: Sequence[int] | Tensor
    sequence: KVSequence
    prefix_len: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillBatch:
    """Hold a flat batch of B requests with R new tokens; made by ``from_chunks`` or ``build``.

    Request b has ``new_lens[b]`` new tokens behind ``prefix_lens[b]`` cached ones. Index arrays exist on the host, as
    CPU tensors and tuples, and on the device, so that no backend reads from the device. ``B == 0`` is a valid batch.
    Nothing is shared with what the caller gave.

    A request may read what another request of the same batch writes, in any order: a layer writes the keys and values
    of all rows before it attends. That takes page tables of the caller's own; sequences share what is cached, and none
    writes it.

    Attributes:
        new_lens: new tokens of each request, each at least 1.
        prefix_lens: cached tokens of each request.
        input_ids_R: int64 on the host.
        positions_R: int64 on the host; position in its request.
        slot_mapping_R: int64 on the host; the flat KV slot that each new token is written to.
        page_table_BW: int32 on the host; page numbers of each request, padded with page 0.
        kv_cache: the cache that the batch was made for.
        device: where the device copies live.
        pages: page numbers of each request, without padding; empty for scratch.
        sequences: the requests' sequences, or empty when the batch was built from arrays.
        held_before: pages that each sequence held before ``from_chunks``; empty for any other batch.
    """

    new_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    input_ids_R: Tensor
    positions_R: Tensor
    slot_mapping_R: Tensor
    page_table_BW: Tensor
    kv_cache: PagedKVCache
    device: torch.device
    pages: tuple[tuple[int, ...], ...] = ()
    sequences: tuple[KVSequence, ...] = ()
    held_before: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expected = {
            "input_ids_R": torch.int64,
            "positions_R": torch.int64,
            "slot_mapping_R": torch.int64,
            "page_table_BW": torch.int32,
        }
        for name, dtype in expected.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.device.type != "cpu":
                raise BatchError(
                    f"{name} is {tensor.dtype} on {tensor.device}, but must be {dtype} on the host: kernels read "
                    "index arrays of another type without noticing"
                )

    @classmethod
    @neutrally("PrefillBatch.from_chunks")
    def from_chunks(cls, chunks: Sequence[Chunk], kv_cache: PagedKVCache) -> "PrefillBatch":
        """Lay out ``chunks`` as one batch, taking pages from ``kv_cache`` as needed.

        Where a request is to write a page that other sequences hold too, behind a fork or when it recomputes, its
        sequence gets a page of its own instead, and what is written there is copied at once, on the current stream.

        Raises BatchError naming the request for tokens that are no integers, an empty chunk, a prefix that is not
        cached, a sequence that is there twice or of another cache, and KVCacheError when pages run out. Pages that were
        taken are given back then, and when the runner refuses the batch.
        """
        sequences = tuple([chunk.sequence for chunk in chunks])
        prefix_lens = tuple(
            [
                chunk.sequence.cached
                if chunk.prefix_len is None
                else integer(chunk.prefix_len, f"request {number}: prefix_len")
                for number, chunk in enumerate(chunks)
            ]
        )
        check_sequences(sequences, prefix_lens, kv_cache)
        token_ids = [
            index_tensor(chunk.token_ids, f"request {number}: token_ids")
            for number, chunk in enumerate(chunks)
        ]
        new_lens = tuple(map(len, token_ids))
        check_lengths(new_lens, prefix_lens, len(chunks))
        held = [sequence.pages for sequence in sequences]
        with kv_cache.holders.lock:
            try:
                copies = _take_pages(sequences, prefix_lens, new_lens, kv_cache)
                batch = cls._laid_out(
                    input_ids_R=torch.cat(token_ids)
                    if token_ids
                    else index_tensor((), "input_ids"),
                    new_lens=new_lens,
                    prefix_lens=prefix_lens,
                    pages=_needed(sequences, prefix_lens, new_lens, kv_cache.page_size),
                    kv_cache=kv_cache,
                    sequences=sequences,
                    held_before=tuple(map(len, held)),
                )
                kv_cache.copy_pages(copies)
            except BaseException:
                for sequence, pages in zip(reversed(sequences), reversed(held), strict=True):
                    kv_cache.holders.restore(sequence, pages)
                raise
        return batch

    @classmethod
    @neutrally("PrefillBatch.build")
    def build(
        cls,
        *,
        input_ids: Sequence[int] | Tensor,
        new_lens: Sequence[int],
        page_table: Sequence[Sequence[int]],
        kv_cache: PagedKVCache,
        prefix_lens: Sequence[int] | None = None,
        sequences: tuple[KVSequence, ...] = (),
    ) -> "PrefillBatch":
        """Check arrays of a flat batch, copy them, and put them on the device of ``kv_cache``.

        Args:
            input_ids: R token ids, request after request.
            new_lens: new tokens of each request.
            page_table: page numbers of each request, enough for its prefix and new tokens; slots follow from them.
            kv_cache: gives page size, page numbers and device; nothing is written.
            prefix_lens: cached tokens of each request; default 0.
            sequences: the requests' sequences, if the pages are theirs. Without, pages must be reserved in
                ``kv_cache``, or the cache never have given one to a sequence; a prefix may lie in a sequence's pages.

        Raises BatchError, naming the request, when anything does not add up.
        """
        news = integers(new_lens, "new_lens")
        prefixes = (0,) * len(news) if prefix_lens is None else integers(prefix_lens, "prefix_lens")
        check_lengths(news, prefixes, len(page_table))
        input_ids_R = index_tensor(input_ids, "input_ids")
        if sum(news) != len(input_ids_R):
            raise BatchError(
                f"new lengths add up to {sum(news)} tokens, but there are {len(input_ids_R)} token ids"
            )
        if sequences and len(sequences) != len(news):
            raise BatchError(f"{len(sequences)} sequences were given for {len(news)} requests")
        if sequences:
            check_sequences(sequences, prefixes, kv_cache)
        pages = needed_pages(page_table, news, prefixes, kv_cache)
        check_pages(sequences, pages, prefixes, kv_cache)
        return cls._laid_out(
            input_ids_R=input_ids_R,
            new_lens=news,
            prefix_lens=prefixes,
            pages=pages,
            kv_cache=kv_cache,
            sequences=sequences,
        )

    @classmethod
    def _laid_out(
        cls,
        *,
        input_ids_R: Tensor,
        new_lens: tuple[int, ...],
        prefix_lens: tuple[int, ...],
        pages: tuple[tuple[int, ...], ...],
        kv_cache: PagedKVCache,
        sequences: tuple[KVSequence, ...],
        held_before: tuple[int, ...] = (),
    ) -> "PrefillBatch":
        """Derive positions and slots from lengths and pages that have been checked."""
        page_table_BW = pack_page_table(pages)
        new_B = torch.tensor(new_lens, dtype=torch.int64, device="cpu")
        requests_B = torch.arange(len(new_lens), device="cpu")
        owners_R = torch.repeat_interleave(requests_B, new_B)
        prefix_B = torch.tensor(prefix_lens, dtype=torch.int64, device="cpu")
        skipped_B = prefix_B - (new_B.cumsum(0) - new_B)
        positions_R = torch.arange(len(owners_R), device="cpu") + skipped_B[owners_R]
        slots_R = flat_slots(page_table_BW, owners_R, positions_R, kv_cache.page_size)
        check_slots(slots_R, owners_R)
        return cls(
            new_lens=new_lens,
            prefix_lens=prefix_lens,
            input_ids_R=input_ids_R,
            positions_R=positions_R,
            slot_mapping_R=slots_R,
            page_table_BW=page_table_BW,
            kv_cache=kv_cache,
            device=kv_cache.device,
            pages=pages,
            sequences=sequences,
            held_before=held_before,
        )

    @classmethod
    def scratch(
        cls, new_lens: Sequence[int], kv_cache: PagedKVCache, *, prefix_len: int = 0
    ) -> "PrefillBatch":
        """Return a batch of token 0, each request behind ``prefix_len`` tokens, all in page 0; for warm-up only.

        Its shape is that of a real batch, what it computes means nothing, and nobody's cached tokens are touched.
        """
        total = sum(new_lens)
        width = -(-(prefix_len + max(new_lens, default=0)) // kv_cache.page_size)
        return cls(
            new_lens=tuple(new_lens),
            prefix_lens=(prefix_len,) * len(new_lens),
            input_ids_R=torch.zeros(total, dtype=torch.int64, device="cpu"),
            positions_R=torch.tensor(
                [position for n in new_lens for position in range(prefix_len, prefix_len + n)],
                dtype=torch.int64,
                device="cpu",
            ),
            slot_mapping_R=torch.zeros(total, dtype=torch.int64, device="cpu"),
            page_table_BW=torch.zeros(len(new_lens), width, dtype=torch.int32, device="cpu"),
            kv_cache=kv_cache,
            device=kv_cache.device,
        )

    def give_back(self) -> None:
        """Return the pages that ``from_chunks`` took for this batch, which must not be run then.

        A sequence that has changed since keeps what it has, and a page that was copied to be written stays its own.
        """
        for sequence, pages, before in zip(
            self.sequences, self.pages, self.held_before, strict=False
        ):
            if (
                len(sequence.pages) == max(before, len(pages))
                and sequence.pages[: len(pages)] == pages
            ):
                needed = -(-sequence.cached // self.page_size)
                self.kv_cache.trim(sequence, max(before, needed))

    @property
    def page_size(self) -> int:
        """Return the tokens a page."""
        return self.kv_cache.page_size

    @property
    def num_requests(self) -> int:
        """Return B."""
        return len(self.new_lens)

    @cached_property
    def num_tokens(self) -> int:
        """Return R, the new tokens of all requests."""
        return sum(self.new_lens)

    @cached_property
    def kv_lens(self) -> tuple[int, ...]:
        """Return prefix plus new tokens of each request: the keys its last token sees."""
        return tuple(p + n for p, n in zip(self.prefix_lens, self.new_lens, strict=True))

    @cached_property
    def cu_new_lens(self) -> tuple[int, ...]:
        """Return B + 1 offsets into the R new tokens: request b has rows ``[cu[b], cu[b + 1])``."""
        return tuple(accumulate(self.new_lens, initial=0))

    @cached_property
    def cu_kv_lens(self) -> tuple[int, ...]:
        """Return B + 1 offsets of the requests' keys, as if they were laid out flat."""
        return tuple(accumulate(self.kv_lens, initial=0))

    @cached_property
    def max_new_len(self) -> int:
        """Return the longest run of new tokens, 0 without requests."""
        return max(self.new_lens, default=0)

    @cached_property
    def max_kv_len(self) -> int:
        """Return the longest request, prefix included, 0 without requests."""
        return max(self.kv_lens, default=0)

    @cached_property
    def on_device(self) -> DeviceIndices:
        """Return the index arrays on the device, copied there at first use, in one transfer."""
        return DeviceIndices.of(self)

    @cached_property
    def kv_slots(self) -> Tensor:
        """Return the flat slot of every key, request after request: int64 on the device, ``[cu_kv_lens[-1]]``.

        For backends that gather keys and values; computed on the device at first use, without synchronising.
        """
        total, lens_B = self.cu_kv_lens[-1], self.on_device.kv_lens
        requests_B = torch.arange(self.num_requests, device=self.device)
        owners = torch.repeat_interleave(requests_B, lens_B, output_size=total)
        positions = torch.arange(total, device=self.device) - self.on_device.cu_kv_lens[owners]
        return flat_slots(self.on_device.page_table_BW, owners, positions, self.page_size)


def _take_pages(
    sequences: tuple[KVSequence, ...],
    prefix_lens: tuple[int, ...],
    new_lens: tuple[int, ...],
    kv_cache: PagedKVCache,
) -> list[tuple[int, int]]:
    """Give each sequence pages that it may write; returns which pages are to be copied to which."""
    holders, size, copies = kv_cache.holders, kv_cache.page_size, []
    for sequence, prefix, new in zip(sequences, prefix_lens, new_lens, strict=True):
        kv_cache.extend(sequence, prefix + new)
        if holders.shared:
            first, stop = prefix // size, -(-(prefix + new) // size)
            copies += holders.unshare(sequence, first, stop)
    return copies


def _needed(
    sequences: tuple[KVSequence, ...],
    prefix_lens: tuple[int, ...],
    new_lens: tuple[int, ...],
    page_size: int,
) -> tuple[tuple[int, ...], ...]:
    """Return the pages of each sequence that hold its tokens up to the last new one."""
    lengths = zip(sequences, prefix_lens, new_lens, strict=True)
    return tuple(
        [sequence.pages[: -(-(prefix + new) // page_size)] for sequence, prefix, new in lengths]
    )
