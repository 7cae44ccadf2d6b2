"""Batches: derived arrays against values computed by hand, and an error for everything that does not add up."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bcg_core import (
    BatchError,
    Chunk,
    DeviceIndices,
    KVCacheError,
    KVSequence,
    ModelSpec,
    PagedKVCache,
    PrefillBatch,
)
from bcg_harness.testing import sequence_on, written_sequence

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make_cache(*, num_pages: int = 9, page_size: int = 4) -> PagedKVCache:
    spec = ModelSpec(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        hidden_size=2,
        vocab_size=100,
        max_positions=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return PagedKVCache(spec, num_pages=num_pages, page_size=page_size)


@pytest.fixture
def cache() -> PagedKVCache:
    """Return a cache of 8 usable pages of 4 tokens."""
    return make_cache()


def build(cache: PagedKVCache, **changes: Any) -> PrefillBatch:
    """Build a batch of 3 new tokens behind 5 cached ones, and of 2 new tokens; with ``changes``."""
    arguments: dict[str, Any] = {
        "input_ids": [10, 11, 12, 20, 21],
        "new_lens": [3, 2],
        "prefix_lens": [5, 0],
        "page_table": [[3, 7], [2]],
    }
    return PrefillBatch.build(kv_cache=cache, **(arguments | changes))


# Derived arrays, by hand

BY_HAND: dict[str, tuple[Callable[[PrefillBatch], Any], Any]] = {
    "num_requests": (lambda b: b.num_requests, 2),
    "num_tokens": (lambda b: b.num_tokens, 5),
    "new_lens": (lambda b: b.new_lens, (3, 2)),
    "prefix_lens": (lambda b: b.prefix_lens, (5, 0)),
    "kv_lens": (lambda b: b.kv_lens, (8, 2)),
    "cu_new_lens": (lambda b: b.cu_new_lens, (0, 3, 5)),
    "cu_kv_lens": (lambda b: b.cu_kv_lens, (0, 8, 10)),
    "max_new_len": (lambda b: b.max_new_len, 3),
    "max_kv_len": (lambda b: b.max_kv_len, 8),
    "input_ids": (lambda b: b.input_ids_R.tolist(), [10, 11, 12, 20, 21]),
    "positions": (lambda b: b.positions_R.tolist(), [5, 6, 7, 0, 1]),
    "slot_mapping": (lambda b: b.slot_mapping_R.tolist(), [29, 30, 31, 8, 9]),
    "page_table": (lambda b: b.page_table_BW.tolist(), [[3, 7], [2, 0]]),
    "num_pages": (lambda b: b.kv_cache.num_pages, 9),
    "pages": (lambda b: b.pages, ((3, 7), (2,))),
    "page_size": (lambda b: b.page_size, 4),
    "device": (lambda b: b.device, torch.device("cpu")),
    "sequences": (lambda b: b.sequences, ()),
    "kv_slots": (lambda b: b.kv_slots.tolist(), [12, 13, 14, 15, 28, 29, 30, 31, 8, 9]),
}


@pytest.mark.parametrize(("read", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_a_batch_has_the_arrays_that_follow_from_its_lengths(
    cache: PagedKVCache, read: Callable[[PrefillBatch], Any], expected: Any
) -> None:
    assert read(build(cache)) == expected


def test_a_prefix_is_zero_unless_given(cache: PagedKVCache) -> None:
    batch = build(cache, prefix_lens=None)
    assert batch.prefix_lens == (0, 0)
    assert batch.slot_mapping_R.tolist() == [12, 13, 14, 8, 9]


def test_pages_beyond_what_is_needed_are_left_out(cache: PagedKVCache) -> None:
    assert build(cache, page_table=[[3, 7, 1], [2, 4]]).page_table_BW.tolist() == [[3, 7], [2, 0]]


@pytest.mark.parametrize("given_as", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
def test_token_ids_may_be_a_list_a_tuple_or_a_tensor(
    cache: PagedKVCache, given_as: Callable[[list[int]], Any]
) -> None:
    batch = build(cache, input_ids=given_as([10, 11, 12, 20, 21]))
    assert batch.input_ids_R.tolist() == [10, 11, 12, 20, 21]


@pytest.mark.parametrize("name", ["input_ids_R", "positions_R", "slot_mapping_R"])
def test_indices_on_the_host_are_int64(cache: PagedKVCache, name: str) -> None:
    assert getattr(build(cache), name).dtype == torch.int64


def test_the_page_table_on_the_host_is_int32(cache: PagedKVCache) -> None:
    assert build(cache).page_table_BW.dtype == torch.int32


# On the device

DEVICE_ARRAYS = ["cu_new_lens", "cu_kv_lens", "kv_lens", "page_table_BW"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cu_new_lens", [0, 3, 5]),
        ("cu_kv_lens", [0, 8, 10]),
        ("kv_lens", [8, 2]),
        ("page_table_BW", [[3, 7], [2, 0]]),
    ],
)
def test_device_indices_have_the_values_of_the_host(
    cache: PagedKVCache, name: str, expected: list[Any]
) -> None:
    assert getattr(build(cache).on_device, name).tolist() == expected


@pytest.mark.parametrize("name", DEVICE_ARRAYS)
def test_device_indices_are_contiguous_int32(cache: PagedKVCache, name: str) -> None:
    array = getattr(build(cache).on_device, name)
    assert array.dtype == torch.int32
    assert array.is_contiguous()


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", DEVICE_ARRAYS)
def test_device_indices_are_aligned_to_16_bytes(
    cache: PagedKVCache, name: str, requests: int
) -> None:
    batch = build(
        cache,
        input_ids=[0] * requests,
        new_lens=[1] * requests,
        prefix_lens=None,
        page_table=[[page + 1] for page in range(requests)],
    )
    assert getattr(batch.on_device, name).data_ptr() % 16 == 0


def test_device_indices_are_one_allocation(cache: PagedKVCache) -> None:
    indices = build(cache).on_device
    storages = {getattr(indices, name).untyped_storage().data_ptr() for name in DEVICE_ARRAYS}
    assert len(storages) == 1


def test_device_indices_are_made_once(cache: PagedKVCache) -> None:
    batch = build(cache)
    assert isinstance(batch.on_device, DeviceIndices)
    assert batch.on_device is batch.on_device


# From chunks


def test_chunks_of_new_requests_start_at_position_0(cache: PagedKVCache) -> None:
    batch = PrefillBatch.from_chunks(
        [
            Chunk(token_ids=[1, 2, 3], sequence=KVSequence()),
            Chunk(token_ids=[4], sequence=KVSequence()),
        ],
        cache,
    )
    assert batch.positions_R.tolist() == [0, 1, 2, 0]
    assert batch.input_ids_R.tolist() == [1, 2, 3, 4]


def test_chunks_take_pages_for_their_sequences(cache: PagedKVCache) -> None:
    sequence = KVSequence()
    batch = PrefillBatch.from_chunks([Chunk(token_ids=range(5), sequence=sequence)], cache)
    assert len(sequence.pages) == 2
    assert batch.page_table_BW.tolist() == [list(sequence.pages)]
    assert batch.sequences == (sequence,)


def test_a_batch_from_chunks_leaves_what_is_cached_to_the_runner(cache: PagedKVCache) -> None:
    sequence = KVSequence()
    PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=sequence)], cache)
    assert sequence.cached == 0


def test_a_chunk_goes_on_behind_what_is_cached(cache: PagedKVCache) -> None:
    sequence = sequence_on(cache, [5, 2], cached=6)
    batch = PrefillBatch.from_chunks([Chunk(token_ids=[1, 2, 3], sequence=sequence)], cache)
    assert batch.prefix_lens == (6,)
    assert batch.positions_R.tolist() == [6, 7, 8]
    assert batch.slot_mapping_R.tolist() == [2 * 4 + 2, 2 * 4 + 3, sequence.pages[2] * 4]


@pytest.mark.parametrize("prefix", [0, 1, 4, 6])
def test_a_chunk_may_recompute_from_a_shorter_prefix(cache: PagedKVCache, prefix: int) -> None:
    sequence = sequence_on(cache, [5, 2], cached=6)
    chunk = Chunk(token_ids=[1], sequence=sequence, prefix_len=prefix)
    assert PrefillBatch.from_chunks([chunk], cache).positions_R.tolist() == [prefix]


def test_chunks_may_mix_lists_and_tensors(cache: PagedKVCache) -> None:
    batch = PrefillBatch.from_chunks(
        [
            Chunk(token_ids=[1, 2], sequence=KVSequence()),
            Chunk(token_ids=torch.tensor([3], dtype=torch.int32), sequence=KVSequence()),
        ],
        cache,
    )
    assert batch.input_ids_R.tolist() == [1, 2, 3]


def test_a_batch_does_not_follow_later_changes_of_its_sequence(cache: PagedKVCache) -> None:
    sequence = KVSequence()
    batch = PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=sequence)], cache)
    before = batch.page_table_BW.tolist()
    cache.free(sequence)
    assert batch.page_table_BW.tolist() == before


# Without requests


@pytest.mark.parametrize(
    "make",
    [
        lambda cache: PrefillBatch.from_chunks([], cache),
        lambda cache: PrefillBatch.build(input_ids=[], new_lens=[], page_table=[], kv_cache=cache),
        lambda cache: PrefillBatch.scratch([], cache),
    ],
    ids=["from_chunks", "build", "scratch"],
)
def test_a_batch_may_have_no_requests(
    cache: PagedKVCache, make: Callable[[PagedKVCache], PrefillBatch]
) -> None:
    batch = make(cache)
    assert (batch.num_requests, batch.num_tokens) == (0, 0)
    assert (batch.max_new_len, batch.max_kv_len) == (0, 0)
    assert (batch.cu_new_lens, batch.cu_kv_lens) == ((0,), (0,))
    assert batch.on_device.cu_new_lens.tolist() == [0]
    assert batch.on_device.page_table_BW.shape == (0, 0)
    assert batch.positions_R.dtype == torch.int64


# Scratch


def test_a_scratch_batch_lives_on_page_0(cache: PagedKVCache) -> None:
    batch = PrefillBatch.scratch([5, 1], cache)
    assert batch.page_table_BW.tolist() == [[0, 0], [0, 0]]
    assert batch.slot_mapping_R.tolist() == [0] * 6
    assert batch.input_ids_R.tolist() == [0] * 6


def test_a_scratch_batch_has_the_shape_of_a_real_one(cache: PagedKVCache) -> None:
    scratch, real = (
        PrefillBatch.scratch([5, 1], cache),
        PrefillBatch.from_chunks(
            [Chunk(token_ids=range(n), sequence=KVSequence()) for n in (5, 1)], cache
        ),
    )
    assert scratch.cu_new_lens == real.cu_new_lens
    assert scratch.positions_R.tolist() == real.positions_R.tolist()
    assert scratch.page_table_BW.shape == real.page_table_BW.shape


def test_a_scratch_batch_may_lie_behind_a_prefix(cache: PagedKVCache) -> None:
    batch = PrefillBatch.scratch([5, 1], cache, prefix_len=4)
    assert batch.prefix_lens == (4, 4)
    assert batch.positions_R.tolist() == [4, 5, 6, 7, 8, 4]
    assert batch.page_table_BW.tolist() == [[0, 0, 0]] * 2


def test_a_scratch_batch_takes_no_pages(cache: PagedKVCache) -> None:
    PrefillBatch.scratch([5, 1], cache)
    assert cache.free_pages == 8


# What does not add up

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too_few_tokens": (
        {"input_ids": [1, 2, 3, 4]},
        "new lengths add up to 5 tokens, but there are 4 token ids",
    ),
    "too_many_tokens": ({"input_ids": range(6)}, "add up to 5 tokens, but there are 6 token ids"),
    "fewer_prefixes": (
        {"prefix_lens": [5]},
        "2 new lengths, 1 prefix lengths and 2 page lists do not describe the same requests",
    ),
    "fewer_page_lists": ({"page_table": [[3, 7]]}, "2 new lengths, 2 prefix lengths and 1 page"),
    "no_new_tokens": ({"new_lens": [5, 0]}, "request 1: 0 new tokens; a request needs at least"),
    "negative_length": ({"new_lens": [-1, 6]}, "request 0: -1 new tokens"),
    "negative_prefix": ({"prefix_lens": [5, -2]}, "request 1: a prefix of -2 tokens is negative"),
    "too_few_pages": (
        {"page_table": [[3], [2]]},
        "request 0: 8 tokens need 2 pages of 4 tokens, its page table has 1",
    ),
    "no_pages": ({"page_table": [[3, 7], []]}, "request 1: 2 tokens need 1 pages"),
    "reserved_page": (
        {"page_table": [[3, 7], [0]]},
        r"request 1: page 0 is not among pages 1 to 8 of the KV cache \(page 0 is reserved",
    ),
    "page_beyond_the_cache": ({"page_table": [[3, 9], [2]]}, "request 0: page 9 is not among"),
    "negative_page": ({"page_table": [[-1, 7], [2]]}, "request 0: page -1 is not among"),
    "page_shared_by_requests": (
        {"prefix_lens": [0, 0], "page_table": [[3], [3]]},
        "request 1: slot 12 is used twice, request 0 writes it too",
    ),
    "page_twice_in_a_request": (
        {"page_table": [[3, 3], [2]]},
        "request 0: page 3 is in its page table twice",
    ),
    "sequences_of_other_requests": (
        {"sequences": (KVSequence(),)},
        "1 sequences were given for 2 requests",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_arrays_that_do_not_add_up_are_refused(
    cache: PagedKVCache, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        build(cache, **changes)


def test_a_batch_error_is_a_value_error(cache: PagedKVCache) -> None:
    with pytest.raises(ValueError, match="new tokens"):
        build(cache, new_lens=[5, 0])


def test_an_empty_chunk_is_refused(cache: PagedKVCache) -> None:
    chunks = [
        Chunk(token_ids=[1], sequence=KVSequence()),
        Chunk(token_ids=[], sequence=KVSequence()),
    ]
    with pytest.raises(BatchError, match="request 1: 0 new tokens"):
        PrefillBatch.from_chunks(chunks, cache)


@pytest.mark.parametrize("prefix", [-1, 7, 100])
def test_a_prefix_that_is_not_cached_is_refused(cache: PagedKVCache, prefix: int) -> None:
    good = Chunk(token_ids=[1], sequence=KVSequence())
    wrong = Chunk(token_ids=[1], sequence=sequence_on(cache, [5, 2], cached=6), prefix_len=prefix)
    with pytest.raises(
        BatchError, match=f"request 1: a prefix of {prefix} tokens was asked for, 6 are cached"
    ):
        PrefillBatch.from_chunks([good, wrong], cache)


def test_refused_chunks_take_no_pages(cache: PagedKVCache) -> None:
    good, wrong = KVSequence(), KVSequence()
    with pytest.raises(BatchError):
        PrefillBatch.from_chunks(
            [Chunk(token_ids=[1], sequence=good), Chunk(token_ids=[], sequence=wrong)], cache
        )
    assert (good.pages, cache.free_pages) == ((), 8)


def test_a_sequence_that_is_in_a_batch_twice_is_refused(cache: PagedKVCache) -> None:
    sequence = KVSequence()
    with pytest.raises(BatchError, match="request 1: its sequence is in the batch twice"):
        PrefillBatch.from_chunks(
            [Chunk(token_ids=[1], sequence=sequence), Chunk(token_ids=[2], sequence=sequence)],
            cache,
        )


def test_when_pages_run_out_those_that_were_taken_are_given_back(cache: PagedKVCache) -> None:
    first, second = KVSequence(), KVSequence()
    cache.extend(first, 8)
    held = first.pages
    with pytest.raises(KVCacheError, match="13 tokens need 4 more pages"):
        PrefillBatch.from_chunks(
            [
                Chunk(token_ids=range(20), sequence=first),
                Chunk(token_ids=range(13), sequence=second),
            ],
            cache,
        )
    assert (first.pages, second.pages, cache.free_pages) == (held, (), 6)
    cache.free(first)
    assert cache.free_pages == 8


def test_chunks_that_fail_late_give_their_pages_back(
    cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = written_sequence(cache, 2), KVSequence()

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bcg_core.batch.check_slots", interrupt)
    with pytest.raises(KeyboardInterrupt):
        PrefillBatch.from_chunks(
            [Chunk(token_ids=range(9), sequence=sequence) for sequence in (one, two)], cache
        )
    assert (len(one.pages), one.cached, two.pages, cache.free_pages) == (1, 2, (), 7)


# Any lengths

requests = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=8)


def batch_of(lengths: list[tuple[int, int]], page_size: int) -> PrefillBatch:
    cache = make_cache(num_pages=200, page_size=page_size)
    sequences = [written_sequence(cache, prefix) for prefix, _ in lengths]
    chunks = [
        Chunk(token_ids=range(new), sequence=sequence)
        for sequence, (_, new) in zip(sequences, lengths, strict=True)
    ]
    return PrefillBatch.from_chunks(chunks, cache)


@UNHURRIED
@given(lengths=requests, page_size=st.integers(1, 5))
def test_slots_follow_from_pages_and_positions(
    lengths: list[tuple[int, int]], page_size: int
) -> None:
    batch = batch_of(lengths, page_size)
    owners = [b for b, new in enumerate(batch.new_lens) for _ in range(new)]
    expected = [
        int(batch.page_table_BW[b, p // page_size]) * page_size + p % page_size
        for b, p in zip(owners, batch.positions_R.tolist(), strict=True)
    ]
    assert batch.slot_mapping_R.tolist() == expected


@UNHURRIED
@given(lengths=requests, page_size=st.integers(1, 5))
def test_new_tokens_are_the_last_keys_of_their_request(
    lengths: list[tuple[int, int]], page_size: int
) -> None:
    batch = batch_of(lengths, page_size)
    ends = list(zip(batch.cu_kv_lens[1:], batch.new_lens, strict=True))
    tails = [slot for end, new in ends for slot in batch.kv_slots[end - new : end].tolist()]
    assert batch.slot_mapping_R.tolist() == tails


@UNHURRIED
@given(lengths=requests, page_size=st.integers(1, 5))
def test_positions_count_up_behind_the_prefix(
    lengths: list[tuple[int, int]], page_size: int
) -> None:
    batch = batch_of(lengths, page_size)
    expected = [prefix + t for prefix, new in lengths for t in range(new)]
    assert batch.positions_R.tolist() == expected


@UNHURRIED
@given(lengths=requests, page_size=st.integers(1, 5))
def test_no_slot_is_reserved_or_written_twice(
    lengths: list[tuple[int, int]], page_size: int
) -> None:
    slots = batch_of(lengths, page_size).slot_mapping_R.tolist()
    assert len(set(slots)) == len(slots)
    assert all(slot >= page_size for slot in slots)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("page_table_BW", torch.int64, id="pages-int64"),
        pytest.param("input_ids_R", torch.int32, id="tokens-int32"),
        pytest.param("positions_R", torch.int32, id="positions-int32"),
        pytest.param("slot_mapping_R", torch.int32, id="slots-int32"),
    ],
)
def test_index_arrays_of_another_type_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    batch = PrefillBatch.scratch([3], make_cache())
    with pytest.raises(BatchError, match=f"{name} is {dtype} on cpu"):
        replace(batch, **{name: getattr(batch, name).to(dtype)})
