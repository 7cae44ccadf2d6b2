"""What is refused about who holds a page and how far it is written, and what a refused batch gives back."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    BatchError,
    Chunk,
    KVCacheError,
    KVSequence,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
)
from bcg_harness.testing import sequence_on, written_sequence

Make = Callable[..., Any]


def batch_of(kv_cache: PagedKVCache, *sequences: KVSequence, new: int = 3) -> PrefillBatch:
    chunks = [Chunk(token_ids=[1] * new, sequence=sequence) for sequence in sequences]
    return PrefillBatch.from_chunks(chunks, kv_cache)


def raw(kv_cache: PagedKVCache, *rows: list[int], prefix: int = 0) -> PrefillBatch:
    """Return a batch of two new tokens a request, on page tables that the caller made."""
    return PrefillBatch.build(
        input_ids=[1, 2] * len(rows),
        new_lens=[2] * len(rows),
        prefix_lens=[prefix] * len(rows),
        page_table=rows,
        kv_cache=kv_cache,
    )


@pytest.fixture
def other_cache(toy_model: type[Any]) -> PagedKVCache:
    return PagedKVCache(toy_model().spec, num_pages=32, page_size=4)


# A sequence says what its cache says


@pytest.mark.parametrize("claims", [{"pages": [1]}, {"cached": 36}, {"pages": [], "cached": 0}])
def test_a_sequence_is_not_made_by_hand(claims: dict[str, Any]) -> None:
    with pytest.raises(KVCacheError, match=r"its cache's to say\. PagedKVCache\.fork\(sequence"):
        KVSequence(**claims)


def test_pages_are_read_only(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 5)
    assert isinstance(sequence.pages, tuple)
    with pytest.raises(AttributeError):
        sequence.pages = (1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, pickle.dumps],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_sequence_is_not_copied(kv_cache: PagedKVCache, duplicate: Callable[[Any], Any]) -> None:
    with pytest.raises(KVCacheError, match=r"cannot be copied or pickled.* PagedKVCache.fork"):
        duplicate(written_sequence(kv_cache, 5))


@pytest.mark.parametrize("tokens", [7, 8, 100, -1])
def test_what_is_not_written_does_not_count_as_cached(kv_cache: PagedKVCache, tokens: int) -> None:
    sequence = written_sequence(kv_cache, 6)
    kv_cache.extend(sequence, 20)
    with pytest.raises(KVCacheError, match=rf"{tokens} tokens cannot count as cached, 6 are wri"):
        sequence.cached = tokens
    assert sequence.cached == 6


def test_a_sequence_may_go_back_and_forth_within_what_is_written(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 6)
    sequence.cached = 2
    sequence.cached = 6
    assert sequence.cached == 6


def test_after_a_recomputation_old_tokens_do_not_count(make_runner: Make) -> None:
    runner = make_runner()
    sequence = written_sequence(runner.kv_cache, 10)
    chunk = Chunk(token_ids=[1, 2], sequence=sequence, prefix_len=3)
    runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache))
    with pytest.raises(KVCacheError, match="6 tokens cannot count as cached, 5 are written"):
        sequence.cached = 6


def test_a_recomputation_that_fails_leaves_its_prefix(make_runner: Make) -> None:
    runner = make_runner()
    sequence = written_sequence(runner.kv_cache, 10)
    chunk = Chunk(token_ids=[1, 2], sequence=sequence, prefix_len=3)
    batch = PrefillBatch.from_chunks([chunk], runner.kv_cache)

    def sample(logits_BV: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(KeyError):
        runner.prefill(batch, sample=sample)
    assert sequence.cached == 3
    with pytest.raises(KVCacheError, match="3 are written"):
        sequence.cached = 4


def test_tokens_without_a_page_are_not_written(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 6)
    with pytest.raises(KVCacheError, match="has 2 pages of 4 tokens, not enough for 9: call exten"):
        kv_cache.mark_written(sequence, 9)


def test_what_the_caller_wrote_is_a_prefix(make_runner: Make, make_chunk: Make) -> None:
    runner = make_runner()
    whole = make_chunk(8)
    logits_BV = runner.prefill(PrefillBatch.from_chunks([whole], runner.kv_cache)).logits_BV
    copied = KVSequence()
    runner.kv_cache.extend(copied, 6)
    for old, new in zip(whole.sequence.pages, copied.pages, strict=True):
        storage = runner.kv_cache.storage_L2PSKH
        storage[:, :, new] = storage[:, :, old]
    runner.kv_cache.mark_written(copied, 6)
    rest = Chunk(token_ids=whole.token_ids[6:], sequence=copied)
    logits_BV, expected_BV = (
        runner.prefill(PrefillBatch.from_chunks([rest], runner.kv_cache)).logits_BV,
        logits_BV.clone(),
    )
    torch.testing.assert_close(logits_BV, expected_BV)


# A sequence of another cache


USES: dict[str, Callable[[PagedKVCache, KVSequence], Any]] = {
    "extend": lambda cache, sequence: cache.extend(sequence, 20),
    "trim": lambda cache, sequence: cache.trim(sequence, 1),
    "free": lambda cache, sequence: cache.free(sequence),
    "fork": lambda cache, sequence: cache.fork(sequence),
    "unshare": lambda cache, sequence: cache.unshare(sequence, 0, 4),
    "mark_written": lambda cache, sequence: cache.mark_written(sequence, 4),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_sequence_of_another_cache_is_refused(
    kv_cache: PagedKVCache, other_cache: PagedKVCache, use: Callable[..., Any]
) -> None:
    written_sequence(kv_cache, 6)
    sequence = written_sequence(other_cache, 6)
    with pytest.raises(KVCacheError, match="2 pages of another KV cache: free it there first"):
        use(kv_cache, sequence)
    assert (len(sequence.pages), sequence.cached) == (2, 6)
    assert (kv_cache.free_pages, other_cache.free_pages) == (29, 29)


def test_a_chunk_behind_another_cache_is_refused(
    kv_cache: PagedKVCache, other_cache: PagedKVCache
) -> None:
    with pytest.raises(BatchError, match="request 1: its sequence holds pages of another KV cache"):
        batch_of(kv_cache, KVSequence(), written_sequence(other_cache, 6))
    assert kv_cache.free_pages == 31


def test_a_sequence_that_was_freed_may_go_to_another_cache(
    kv_cache: PagedKVCache, other_cache: PagedKVCache
) -> None:
    sequence = written_sequence(other_cache, 6)
    other_cache.free(sequence)
    assert len(batch_of(kv_cache, sequence).pages[0]) == 1


# Page tables of the caller's own


def test_a_raw_write_to_a_page_of_a_sequence_is_refused(kv_cache: PagedKVCache) -> None:
    kv_cache.reserve([9])
    page = written_sequence(kv_cache, 4).pages[0]
    with pytest.raises(BatchError, match=rf"request 1: it writes page {page}, which a sequence ho"):
        raw(kv_cache, [9], [page])


def test_a_raw_prefix_may_lie_in_pages_of_a_sequence(kv_cache: PagedKVCache) -> None:
    kv_cache.reserve([9])
    page = written_sequence(kv_cache, 4).pages[0]
    assert raw(kv_cache, [page, 9], prefix=4).pages == ((page, 9),)


@pytest.mark.parametrize("rows", [([9], [8]), ([9], [9, 8])], ids=["written", "read"])
def test_a_raw_page_that_a_sequence_may_get_is_refused(
    kv_cache: PagedKVCache, rows: tuple[list[int], ...]
) -> None:
    kv_cache.reserve([9])
    kv_cache.free(written_sequence(kv_cache, 4))
    prefix = 0 if len(rows[1]) == 1 else 4
    with pytest.raises(
        BatchError, match=r"page 8 is free, .* PagedKVCache.reserve, or use Prefill"
    ):
        raw(kv_cache, rows[1], prefix=prefix)


def test_a_cache_without_sequences_is_the_callers(kv_cache: PagedKVCache) -> None:
    assert raw(kv_cache, [9], [8]).pages == ((9,), (8,))


def test_a_raw_batch_is_refused_when_a_sequence_got_its_pages(make_runner: Make) -> None:
    runner = make_runner()
    batch = raw(runner.kv_cache, [1])
    written_sequence(runner.kv_cache, 4)
    with pytest.raises(BatchError, match="request 0: it writes page 1, which a sequence holds"):
        runner.prefill(batch)


def test_reserved_pages_go_to_no_sequence(kv_cache: PagedKVCache) -> None:
    kv_cache.reserve([1, 2, 5])
    assert written_sequence(kv_cache, 12).pages == (3, 4, 6)
    assert kv_cache.free_pages == 31 - 6


def test_pages_that_are_put_back_go_to_sequences_again(kv_cache: PagedKVCache) -> None:
    kv_cache.reserve([1, 2])
    kv_cache.unreserve([2])
    assert written_sequence(kv_cache, 8).pages == (2, 3)


@pytest.mark.parametrize("pages", [[1], [0], [32], [9, 9]], ids=str)
def test_only_free_pages_are_reserved(kv_cache: PagedKVCache, pages: list[int]) -> None:
    written_sequence(kv_cache, 4)
    with pytest.raises(KVCacheError, match=r"pages .* cannot be reserved: each must be free"):
        kv_cache.reserve(pages)
    assert kv_cache.free_pages == 30


@pytest.mark.parametrize("pages", [[1], [8, 9], [9, 9]], ids=str)
def test_only_reserved_pages_are_put_back(kv_cache: PagedKVCache, pages: list[int]) -> None:
    kv_cache.reserve([9])
    with pytest.raises(KVCacheError, match=r"pages .* cannot be put back: each must be reserved"):
        kv_cache.unreserve(pages)
    assert kv_cache.free_pages == 30


def test_arrays_with_sequences_may_not_write_shared_pages(kv_cache: PagedKVCache) -> None:
    fork = kv_cache.fork(written_sequence(kv_cache, 4), 2)
    with pytest.raises(BatchError, match="request 0: it writes page 1, which another sequence hol"):
        PrefillBatch.build(
            input_ids=[1],
            new_lens=[1],
            prefix_lens=[2],
            page_table=[[1]],
            kv_cache=kv_cache,
            sequences=(fork,),
        )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["writer_first", "reader_first"])
def test_what_a_request_of_the_batch_writes_another_may_read(
    make_runner: Make, order: tuple[int, int]
) -> None:
    runner = make_runner()
    tokens = {0: [5, 6, 7, 8], 1: [9, 10]}
    rows, prefixes = {0: [1], 1: [1, 2]}, {0: 0, 1: 4}
    batch = PrefillBatch.build(
        input_ids=[token for number in order for token in tokens[number]],
        new_lens=[len(tokens[number]) for number in order],
        prefix_lens=[prefixes[number] for number in order],
        page_table=[rows[number] for number in order],
        kv_cache=runner.kv_cache,
    )
    logits_BV = runner.prefill(batch).logits_BV.clone()
    for row, number in enumerate(order):
        whole = [5, 6, 7, 8, *(tokens[1] if number else [])]
        alone = PrefillBatch.build(
            input_ids=whole, new_lens=[len(whole)], page_table=[[8, 9]], kv_cache=runner.kv_cache
        )
        torch.testing.assert_close(logits_BV[row], runner.prefill(alone).logits_BV[0])


# During a prefill


CHANGES: dict[str, Callable[[PagedKVCache, KVSequence], Any]] = {
    "freed": lambda cache, sequence: cache.free(sequence),
    "trimmed": lambda cache, sequence: cache.trim(sequence, 1),
    "freed_and_extended": lambda cache, sequence: (
        cache.free(sequence),
        cache.extend(sequence, 12),
    ),
    "rewound": lambda cache, sequence: setattr(sequence, "cached", 2),
}


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_sequence_that_changes_during_its_prefill_does_not_count(
    make_runner: Make, change: Callable[..., Any], where: str
) -> None:
    runner, changed = make_runner(), []
    one, other = (written_sequence(runner.kv_cache, 6) for _ in range(2))
    batch = batch_of(runner.kv_cache, one, other)

    def meddle() -> None:
        if not changed:
            changed.append(change(runner.kv_cache, other))

    def sample(logits_BV: Tensor) -> Tensor:
        if where == "sample":
            meddle()
        return logits_BV.argmax(dim=-1)

    if where == "forward":
        runner.backend.before_forward = lambda layer: meddle()
    with pytest.raises(BatchError, match="request 1: made before its sequence changed"):
        runner.prefill(batch, sample=sample)
    assert one.cached == 6
    assert other.cached <= 6
    runner.backend.before_forward = lambda layer: None
    runner.prefill(batch_of(runner.kv_cache, one, KVSequence()))
    assert one.cached == 9


def test_pages_of_a_running_prefill_go_to_nobody_before_it_ends(make_runner: Make) -> None:
    runner, got = make_runner(), KVSequence()
    sequence = written_sequence(runner.kv_cache, 6)
    batch = batch_of(runner.kv_cache, sequence)
    held = sequence.pages

    def steal(layer: int) -> None:
        if layer == 0:
            runner.kv_cache.free(sequence)
            runner.kv_cache.extend(got, 4 * runner.kv_cache.free_pages)

    runner.backend.before_forward = steal
    with pytest.raises(BatchError, match="request 0: made before"):
        runner.prefill(batch)
    assert not set(got.pages) & set(held)
    assert runner.kv_cache.free_pages == len(held)
    assert runner.kv_cache.owner_of(held[0]) == ()


def test_pages_of_others_are_free_at_once_during_a_prefill(make_runner: Make) -> None:
    runner, free = make_runner(), []
    ended = written_sequence(runner.kv_cache, 40)

    def end(layer: int) -> None:
        runner.kv_cache.free(ended)
        free.append(runner.kv_cache.free_pages)

    runner.backend.before_forward = end
    runner.prefill(batch_of(runner.kv_cache, KVSequence()))
    assert free == [30, 30]


def test_a_sequence_in_two_prefills_at_once_is_refused(make_runner: Make) -> None:
    outer, inner = make_runner(), make_runner()
    sequence = KVSequence()
    batch = batch_of(outer.kv_cache, sequence)
    again = batch_of(outer.kv_cache, KVSequence(), sequence)

    def nest(layer: int) -> None:
        with pytest.raises(BatchError, match="request 1: its sequence is in a prefill that has no"):
            inner.prefill(again)

    outer.backend.before_forward = nest
    outer.prefill(batch)
    assert sequence.cached == 3


class BelievesEverything(PrefillRunner):
    """Count the tokens of a batch as cached, whatever became of its sequences meanwhile."""

    def prefill(self, batch: PrefillBatch, **options: Any) -> Any:
        try:
            return super().prefill(batch, **options)
        except BatchError:
            for sequence, length in zip(batch.sequences, batch.kv_lens, strict=True):
                self.kv_cache.mark_written(sequence, length)
            raise


def test_a_runner_that_counts_freed_pages_is_found(
    kv_cache: PagedKVCache, make_backend: Make, toy_model: type[Any]
) -> None:
    runner = BelievesEverything(toy_model(), kv_cache, make_backend(), buckets=[8])
    sequence = KVSequence()

    def sample(logits_BV: Tensor) -> Tensor:
        kv_cache.free(sequence)
        return logits_BV.argmax(dim=-1)

    with pytest.raises(KVCacheError, match="has 0 pages of 4 tokens, not enough for 3"):
        runner.prefill(batch_of(kv_cache, sequence), sample=sample)


# What a refused batch took


TOO_MUCH: dict[str, tuple[list[int], str]] = {
    "token_outside_the_vocabulary": ([1] * 20 + [61], "token id 61 is not in the vocabulary"),
    "too_long": ([1] * 65, "71 tokens with its prefix, .* 64 positions"),
}


@pytest.mark.parametrize(("tokens", "message"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_batch_that_the_runner_refuses_gives_its_pages_back(
    make_runner: Make, tokens: list[int], message: str
) -> None:
    runner = make_runner()
    sequence, fresh = written_sequence(runner.kv_cache, 6), KVSequence()
    chunks = [Chunk(token_ids=tokens, sequence=sequence), Chunk(token_ids=[1], sequence=fresh)]
    batch = PrefillBatch.from_chunks(chunks, runner.kv_cache)
    with pytest.raises(BatchError, match=message):
        runner.prefill(batch)
    assert (len(sequence.pages), sequence.cached, fresh.pages) == (2, 6, ())
    assert runner.kv_cache.free_pages == 29


def test_too_many_requests_give_their_pages_back(make_runner: Make) -> None:
    runner = make_runner(max_requests=2)
    batch = batch_of(runner.kv_cache, *(KVSequence() for _ in range(3)))
    with pytest.raises(BatchError, match="3 requests, at most 2 fit"):
        runner.prefill(batch)
    assert runner.kv_cache.free_pages == 31


def test_a_refused_batch_leaves_pages_that_the_caller_took(make_runner: Make) -> None:
    runner, sequence = make_runner(), KVSequence()
    runner.kv_cache.extend(sequence, 40)
    batch = PrefillBatch.from_chunks([Chunk(token_ids=[61], sequence=sequence)], runner.kv_cache)
    with pytest.raises(BatchError):
        runner.prefill(batch)
    assert len(sequence.pages) == 10


def test_a_refused_batch_leaves_what_its_sequence_got_since(make_runner: Make) -> None:
    runner, sequence = make_runner(), KVSequence()
    batch = PrefillBatch.from_chunks([Chunk(token_ids=[61], sequence=sequence)], runner.kv_cache)
    later = batch_of(runner.kv_cache, sequence, new=9)
    with pytest.raises(BatchError):
        runner.prefill(batch)
    runner.prefill(later)
    assert sequence.cached == 9


def test_a_batch_for_another_cache_can_still_be_run_there(
    make_runner: Make, other_cache: PagedKVCache
) -> None:
    right, wrong = make_runner(), make_runner(kv_cache=other_cache)
    sequence = KVSequence()
    batch = batch_of(right.kv_cache, sequence)
    with pytest.raises(BatchError, match="another KV cache"):
        wrong.prefill(batch)
    right.prefill(batch)
    assert sequence.cached == 3


def test_pages_are_given_in_the_order_of_a_fresh_cache(kv_cache: PagedKVCache) -> None:
    assert sequence_on(kv_cache, [7, 3], cached=5).pages == (7, 3)
    assert written_sequence(kv_cache, 12).pages == (1, 2, 4)
