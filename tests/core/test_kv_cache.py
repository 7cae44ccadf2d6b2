"""The paged KV cache: layout, writes, and who holds which page."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bcg_core import KVCacheError, KVSequence, ModelSpec, PagedKVCache

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def make(
    *, num_pages: int = 5, page_size: int = 4, dtype: torch.dtype = torch.float32
) -> PagedKVCache:
    spec = ModelSpec(
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=16,
        vocab_size=61,
        max_positions=64,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return PagedKVCache(spec, num_pages=num_pages, page_size=page_size)


def rows(count: int, *, start: float = 1.0) -> torch.Tensor:
    return torch.arange(count * 16.0).reshape(count, 2, 8) + start


# Layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_new_cache_is_all_zeros(dtype: torch.dtype) -> None:
    cache = make(dtype=dtype)
    assert cache.storage_L2PSKH.dtype == dtype
    assert cache.storage_L2PSKH.count_nonzero() == 0


def test_storage_has_a_dimension_for_everything() -> None:
    assert make().storage_L2PSKH.shape == (3, 2, 5, 4, 2, 8)


def test_a_cache_counts_its_slots_and_free_pages() -> None:
    cache = make()
    assert (cache.num_slots, cache.free_pages, cache.device) == (20, 4, torch.device("cpu"))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_pages_of_a_layer_are_contiguous_views(layer: int) -> None:
    cache = make()
    keys, values = cache.keys(layer), cache.values(layer)
    assert keys.shape == values.shape == (5, 4, 2, 8)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.data_ptr() == cache.storage_L2PSKH[layer, 0].data_ptr()
    assert values.data_ptr() == cache.storage_L2PSKH[layer, 1].data_ptr()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_flat_slots_are_the_same_memory_as_pages(layer: int) -> None:
    cache = make()
    keys, values = cache.flat(layer)
    assert keys.shape == values.shape == (20, 2, 8)
    assert keys[3 * 4 + 2].data_ptr() == cache.keys(layer)[3, 2].data_ptr()
    assert values[3 * 4 + 2].data_ptr() == cache.values(layer)[3, 2].data_ptr()


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (-1, 4), (5, 0), (5, -1)])
def test_a_cache_that_holds_nothing_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(KVCacheError, match=r"holds nothing: .* \(page 0 is reserved\)"):
        make(num_pages=num_pages, page_size=page_size)


# Writes


def test_a_write_puts_rows_into_their_slots() -> None:
    cache = make()
    cache.write(1, rows(3), rows(3, start=500.0), torch.tensor([4, 11, 7]))
    keys, values = cache.flat(1)
    assert torch.equal(keys[[4, 11, 7]], rows(3))
    assert torch.equal(values[[4, 11, 7]], rows(3, start=500.0))


def test_a_write_touches_nothing_else() -> None:
    cache = make()
    cache.write(1, rows(2), rows(2), torch.tensor([4, 11]))
    cache.keys(1).view(20, 2, 8)[[4, 11]] = 0
    cache.values(1).view(20, 2, 8)[[4, 11]] = 0
    assert cache.storage_L2PSKH.count_nonzero() == 0


def test_rows_may_be_strided() -> None:
    cache = make()
    fused = torch.arange(3 * 48.0).reshape(3, 6, 8)
    cache.write(0, fused[:, 2:4], fused[:, 4:], torch.tensor([4, 5, 6]))
    assert torch.equal(cache.keys(0)[1, :3], fused[:, 2:4])
    assert torch.equal(cache.values(0)[1, :3], fused[:, 4:])


def test_several_padded_rows_may_share_a_slot_of_page_0() -> None:
    cache = make()
    cache.write(0, rows(4), rows(4), torch.tensor([5, 0, 0, 0]))
    assert torch.equal(cache.flat(0)[0][5], rows(4)[0])
    assert cache.keys(0)[0, 1:].count_nonzero() == 0


# Pages


def test_page_0_is_never_given_away() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 16)
    assert sorted(sequence.pages) == [1, 2, 3, 4]
    assert cache.free_pages == 0


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (16, 4)])
def test_a_sequence_gets_as_many_pages_as_its_length_needs(length: int, pages: int) -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, length)
    assert len(sequence.pages) == pages


def test_pages_a_sequence_has_stay_as_they_are() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 5)
    before = sequence.pages
    cache.extend(sequence, 9)
    assert sequence.pages[:2] == before
    assert len(sequence.pages) == 3


def test_a_shorter_length_takes_no_page_away() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 9)
    cache.extend(sequence, 2)
    assert len(sequence.pages) == 3


def test_two_sequences_never_share_a_page() -> None:
    cache, one, two = make(), KVSequence(), KVSequence()
    cache.extend(one, 6)
    cache.extend(two, 8)
    assert not set(one.pages) & set(two.pages)


def test_too_few_free_pages_are_refused_with_what_is_free() -> None:
    cache, one, two = make(), KVSequence(), KVSequence()
    cache.extend(one, 9)
    with pytest.raises(
        KVCacheError, match=r"6 tokens need 2 more pages of 4 tokens, 1 of 4 are free: free a seq"
    ):
        cache.extend(two, 6)


def test_a_refused_extension_takes_nothing() -> None:
    cache, one, two = make(), KVSequence(), KVSequence()
    cache.extend(one, 9)
    with pytest.raises(KVCacheError):
        cache.extend(two, 6)
    assert (two.pages, cache.free_pages) == ((), 1)


def test_freeing_gives_pages_back_and_empties_the_sequence() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 7)
    cache.mark_written(sequence, 7)
    cache.free(sequence)
    assert (sequence.pages, sequence.cached, cache.free_pages) == ((), 0, 4)


def test_freeing_twice_gives_pages_back_once() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 7)
    cache.free(sequence)
    cache.free(sequence)
    assert cache.free_pages == 4


def test_trimming_gives_back_the_last_pages_and_what_they_cached() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 11)
    cache.mark_written(sequence, 11)
    kept = sequence.pages[:2]
    cache.trim(sequence, 2)
    assert (sequence.pages, sequence.cached, cache.free_pages) == (kept, 8, 2)


def test_trimming_to_more_pages_than_there_are_changes_nothing() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 7)
    cache.mark_written(sequence, 7)
    cache.trim(sequence, 5)
    assert (len(sequence.pages), sequence.cached, cache.free_pages) == (2, 7, 2)


def test_freed_pages_are_given_to_the_next_sequence() -> None:
    cache, one, two = make(), KVSequence(), KVSequence()
    cache.extend(one, 16)
    cache.free(one)
    cache.extend(two, 16)
    assert sorted(two.pages) == [1, 2, 3, 4]


def test_freeing_leaves_the_contents() -> None:
    cache, sequence = make(), KVSequence()
    cache.extend(sequence, 1)
    cache.write(0, rows(1), rows(1), torch.tensor([sequence.pages[0] * 4]))
    page = sequence.pages[0]
    cache.free(sequence)
    assert torch.equal(cache.keys(0)[page, 0], rows(1)[0])


def test_sequences_are_compared_by_identity() -> None:
    assert KVSequence() != KVSequence()


@UNHURRIED
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=30))
def test_every_page_is_free_or_held_by_one_sequence(steps: list[tuple[int, int]]) -> None:
    cache = make(num_pages=12)
    sequences = [KVSequence() for _ in range(4)]
    for number, length in steps:
        act(cache, sequences[number], length)
    held = [page for sequence in sequences for page in sequence.pages]
    assert len(set(held)) == len(held)
    assert len(held) + cache.free_pages == 11
    assert 0 not in held


def act(cache: PagedKVCache, sequence: KVSequence, length: int) -> None:
    """Free at length 0, otherwise extend as far as the cache allows."""
    if length == 0:
        cache.free(sequence)
        return
    try:
        cache.extend(sequence, length)
    except KVCacheError:
        assert length > 4 * cache.free_pages
