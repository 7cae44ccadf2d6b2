"""A batch of prefill requests, validated once, on the host and on the device.

Shape letters: B requests, R real (new) tokens of all requests, W pages of the longest request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor

from bcg_core.batch_checks import check_lengths, check_slots, pack_page_table
from bcg_core.errors import BatchError
from bcg_core.kv_cache import KVSequence, PagedKVCache


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Ask to prefill some more tokens of one request.

    Attributes:
        token_ids: the new tokens, at least one; a tensor must be on the host.
        sequence: the request's pages; tokens already cached there are its prefix.
        prefix_len: tokens before the new ones; default is all that is cached. Fewer means to recompute from there.
    """

    token_ids: Sequence[int] | Tensor
    sequence: KVSequence
    prefix_len: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillBatch:
    """Hold a flat batch of B requests with R new tokens; made by ``from_chunks`` or ``build``.

    Request b has ``new_lens[b]`` new tokens behind ``prefix_lens[b]`` cached ones. Index arrays exist on the host, as
    CPU tensors and tuples, and on the device, so that no backend reads from the device. ``B == 0`` is a valid batch.

    Attributes:
        new_lens: new tokens of each request, each at least 1.
        prefix_lens: cached tokens of each request.
        input_ids_R: int64 on the host.
        positions_R: int64 on the host; position in its request.
        slot_mapping_R: int64 on the host; the flat KV slot that each new token is written to.
        page_table_BW: int32 on the host; page numbers of each request, padded with page 0.
        num_pages: pages of the cache that the batch was made for.
        page_size: tokens a page.
        device: where the device copies live.
        sequences: the requests' page holders, or empty when the batch was built from arrays.
    """

    new_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    input_ids_R: Tensor
    positions_R: Tensor
    slot_mapping_R: Tensor
    page_table_BW: Tensor
    num_pages: int
    page_size: int
    device: torch.device
    sequences: tuple[KVSequence, ...] = ()

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
    def from_chunks(cls, chunks: Sequence[Chunk], kv_cache: PagedKVCache) -> "PrefillBatch":
        """Lay out ``chunks`` as one batch, taking pages from ``kv_cache`` as needed.

        Raises BatchError naming the request for an empty chunk or a prefix that is not cached, and KVCacheError when
        pages run out; pages already taken stay with their sequence.
        """
        prefix_lens: list[int] = []
        for number, chunk in enumerate(chunks):
            cached = chunk.sequence.cached
            prefix = cached if chunk.prefix_len is None else chunk.prefix_len
            if not 0 <= prefix <= cached:
                raise BatchError(
                    f"request {number}: a prefix of {prefix} tokens was asked for, {cached} are cached"
                )
            prefix_lens.append(prefix)
        new_lens = [len(chunk.token_ids) for chunk in chunks]
        check_lengths(new_lens, prefix_lens, len(chunks))
        for chunk, new, prefix in zip(chunks, new_lens, prefix_lens, strict=True):
            kv_cache.extend(chunk.sequence, prefix + new)
        return cls.build(
            input_ids=_concatenate([chunk.token_ids for chunk in chunks]),
            new_lens=new_lens,
            prefix_lens=prefix_lens,
            page_table=[chunk.sequence.pages for chunk in chunks],
            kv_cache=kv_cache,
            sequences=tuple(chunk.sequence for chunk in chunks),
        )

    @classmethod
    def build(
        cls,
        *,
        input_ids: Sequence[int] | Tensor,
        new_lens: Sequence[int],
        page_table: Sequence[Sequence[int]],
        kv_cache: PagedKVCache,
        prefix_lens: Sequence[int] | None = None,
        slot_mapping: Sequence[int] | Tensor | None = None,
        sequences: tuple[KVSequence, ...] = (),
    ) -> "PrefillBatch":
        """Check arrays of a flat batch and put them on the device of ``kv_cache``.

        Args:
            input_ids: R token ids, request after request.
            new_lens: new tokens of each request.
            page_table: page numbers of each request, enough for its prefix and new tokens.
            kv_cache: gives page size, page numbers and device; nothing is written.
            prefix_lens: cached tokens of each request; default 0.
            slot_mapping: R flat slots to write to; default follows from the page table.
            sequences: the requests' page holders, if the caller has them.

        Raises BatchError, naming the request, when anything does not add up.
        """
        prefixes = tuple(prefix_lens if prefix_lens is not None else [0] * len(new_lens))
        news = tuple(new_lens)
        check_lengths(news, prefixes, len(page_table))
        if sequences and len(sequences) != len(news):
            raise BatchError(f"{len(sequences)} sequences were given for {len(news)} requests")
        input_ids_R = torch.as_tensor(input_ids, dtype=torch.int64)
        if sum(news) != len(input_ids_R):
            raise BatchError(
                f"new lengths add up to {sum(news)} tokens, but there are {len(input_ids_R)} token ids"
            )
        page_table_BW = pack_page_table(page_table, news, prefixes, kv_cache)
        new_B = torch.tensor(news, dtype=torch.int64)
        owners_R = torch.repeat_interleave(torch.arange(len(news)), new_B)
        skipped_B = torch.tensor(prefixes, dtype=torch.int64) - (new_B.cumsum(0) - new_B)
        positions_R = torch.arange(len(owners_R)) + skipped_B[owners_R]
        size = kv_cache.page_size
        if slot_mapping is None:
            slots_R = _flat_slots(page_table_BW, owners_R, positions_R, size)
        else:
            slots_R = torch.as_tensor(slot_mapping, dtype=torch.int64)
        check_slots(slots_R, owners_R, kv_cache)
        return cls(
            new_lens=news,
            prefix_lens=prefixes,
            input_ids_R=input_ids_R,
            positions_R=positions_R,
            slot_mapping_R=slots_R,
            page_table_BW=page_table_BW,
            num_pages=kv_cache.num_pages,
            page_size=size,
            device=kv_cache.device,
            sequences=sequences,
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
            input_ids_R=torch.zeros(total, dtype=torch.int64),
            positions_R=_concatenate([range(prefix_len, prefix_len + n) for n in new_lens]),
            slot_mapping_R=torch.zeros(total, dtype=torch.int64),
            page_table_BW=torch.zeros(len(new_lens), width, dtype=torch.int32),
            num_pages=kv_cache.num_pages,
            page_size=kv_cache.page_size,
            device=kv_cache.device,
        )

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
    def on_device(self) -> "DeviceIndices":
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
        return _flat_slots(self.on_device.page_table_BW, owners, positions, self.page_size)


@dataclass(frozen=True, kw_only=True)
class DeviceIndices:
    """Hold a batch's index arrays on the device, int32 and contiguous; read-only, owned by the batch.

    Attributes:
        cu_new_lens: B + 1 offsets of new tokens.
        cu_kv_lens: B + 1 offsets of keys.
        kv_lens: B key counts.
        page_table_BW: pages of each request.
    """

    cu_new_lens: Tensor
    cu_kv_lens: Tensor
    kv_lens: Tensor
    page_table_BW: Tensor

    @classmethod
    def of(cls, batch: PrefillBatch) -> "DeviceIndices":
        """Copy the index arrays of ``batch`` to its device."""
        host = [
            torch.tensor(batch.cu_new_lens, dtype=torch.int32),
            torch.tensor(batch.cu_kv_lens, dtype=torch.int32),
            torch.tensor(batch.kv_lens, dtype=torch.int32),
            batch.page_table_BW.flatten(),
        ]
        packed = torch.cat([_aligned(part) for part in host]).to(batch.device)
        offsets = accumulate((_aligned(part).numel() for part in host), initial=0)
        cu_new, cu_kv, kv, pages = (
            packed[offset : offset + part.numel()]
            for offset, part in zip(offsets, host, strict=False)
        )
        return cls(
            cu_new_lens=cu_new,
            cu_kv_lens=cu_kv,
            kv_lens=kv,
            page_table_BW=pages.view(batch.page_table_BW.shape),
        )


def _aligned(indices: Tensor, elements: int = 4) -> Tensor:
    """Pad to a multiple of 16 bytes, so that every array of a packed transfer starts aligned."""
    return torch.nn.functional.pad(indices, (0, -indices.numel() % elements))


def _flat_slots(page_table_BW: Tensor, owners: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return the int64 flat slot of each (request, position)."""
    pages = page_table_BW[owners, positions // size].to(torch.int64)
    return pages * size + positions % size


def _concatenate(token_ids: Sequence[Sequence[int] | Tensor]) -> Tensor:
    if any(isinstance(ids, Tensor) for ids in token_ids):
        return torch.cat([torch.as_tensor(ids, dtype=torch.int64) for ids in token_ids])
    return torch.tensor(list(chain.from_iterable(token_ids)), dtype=torch.int64)
