"""Sequences that share cached tokens, and what happens when one of them goes on."""

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
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
)
from bcg_harness.testing import MaskBackend, written_sequence

Make = Callable[..., Any]

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]
"""Two full pages of 4 tokens, and half of a third."""
OWN = [8, 9, 7, 9, 3]
FORKED = [2, 3, 8]


class BrokenError(Exception):
    """What a test raises."""


@pytest.fixture(params=["toy", "mask", "sdpa"])
def runner(request: pytest.FixtureRequest, make_runner: Make, make_backend: Make) -> PrefillRunner:
    made: PrefillRunner = make_runner()
    if request.param != "toy":
        made.use_backend(make_backend(MaskBackend) if request.param == "mask" else "sdpa")
    return made


def prefill(runner: PrefillRunner, tokens: list[int], sequence: KVSequence) -> Tensor:
    chunk = Chunk(token_ids=tokens, sequence=sequence)
    result = runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache))
    return result.logits_BV[0].clone()


def prompted(runner: PrefillRunner) -> KVSequence:
    sequence = KVSequence()
    prefill(runner, PROMPT, sequence)
    return sequence


def expected(runner: PrefillRunner, tokens: list[int]) -> Tensor:
    """Return the logits behind ``tokens``, prefilled at once by a request of its own."""
    sequence = KVSequence()
    logits_V = prefill(runner, tokens, sequence)
    runner.kv_cache.free(sequence)
    return logits_V


def both(runner: PrefillRunner, one: KVSequence, other: KVSequence) -> tuple[Tensor, Tensor]:
    chunks = [Chunk(token_ids=OWN, sequence=one), Chunk(token_ids=FORKED, sequence=other)]
    logits_BV = runner.prefill(PrefillBatch.from_chunks(chunks, runner.kv_cache)).logits_BV
    return logits_BV[0].clone(), logits_BV[1].clone()


# Sharing


@pytest.mark.parametrize(
    ("tokens", "pages"), [(None, 3), (10, 3), (9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)]
)
def test_a_fork_shares_the_pages_of_its_tokens(
    kv_cache: PagedKVCache, tokens: int | None, pages: int
) -> None:
    sequence = written_sequence(kv_cache, 10)
    fork = kv_cache.fork(sequence, tokens)
    assert (fork.pages, fork.cached) == (sequence.pages[:pages], 10 if tokens is None else tokens)
    assert kv_cache.free_pages == 31 - 3


@pytest.mark.parametrize("tokens", [-1, 7, 8])
def test_more_than_is_cached_cannot_be_forked(kv_cache: PagedKVCache, tokens: int) -> None:
    sequence = written_sequence(kv_cache, 8)
    sequence.cached = 6
    with pytest.raises(KVCacheError, match=f"{tokens} tokens cannot be shared, 6 are cached"):
        kv_cache.fork(sequence, tokens)
    assert kv_cache.owner_of(sequence.pages[0]) == (sequence,)


def test_owners_of_a_page_are_all_who_hold_it(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 6)
    fork = kv_cache.fork(sequence, 4)
    first, second = sequence.pages
    assert kv_cache.owner_of(first) == (sequence, fork)
    assert kv_cache.owner_of(second) == (sequence,)
    assert kv_cache.owner_of(31) == kv_cache.owner_of(0) == ()


@pytest.mark.parametrize("page", [-1, 32])
def test_a_page_that_does_not_exist_has_no_owner(kv_cache: PagedKVCache, page: int) -> None:
    with pytest.raises(KVCacheError, match=f"page {page} does not exist: there are 32"):
        kv_cache.owner_of(page)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_a_page_is_free_when_the_last_has_given_it_back(
    kv_cache: PagedKVCache, order: tuple[int, ...]
) -> None:
    sequence = written_sequence(kv_cache, 10)
    holders = [sequence, kv_cache.fork(sequence), kv_cache.fork(sequence)]
    free = []
    for number in order:
        kv_cache.free(holders[number])
        free.append(kv_cache.free_pages)
    assert free == [28, 28, 31]


def test_a_fork_of_a_fork_shares_the_same_pages(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 10)
    again = kv_cache.fork(kv_cache.fork(sequence))
    assert again.pages == sequence.pages


def test_tokens_go_on_in_pages_of_their_own_behind_full_pages(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 8)
    fork = kv_cache.fork(sequence)
    PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=fork)], kv_cache)
    assert fork.pages[:2] == sequence.pages
    assert kv_cache.free_pages == 31 - 3


# Copy on write


@pytest.mark.parametrize("who", ["fork", "source"])
def test_who_writes_a_shared_page_gets_a_copy(kv_cache: PagedKVCache, who: str) -> None:
    sequence = written_sequence(kv_cache, 10)
    fork = kv_cache.fork(sequence)
    shared = sequence.pages
    kv_cache.storage_L2PSKH.normal_()
    before = kv_cache.storage_L2PSKH[:, :, shared[2]].clone()
    writer, reader = (fork, sequence) if who == "fork" else (sequence, fork)
    PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=writer)], kv_cache)
    assert (reader.pages, writer.pages[:2]) == (shared, shared[:2])
    assert writer.pages[2] not in shared
    assert torch.equal(kv_cache.storage_L2PSKH[:, :, writer.pages[2]], before)
    assert kv_cache.owner_of(shared[2]) == (reader,)


def test_the_last_who_holds_a_page_writes_it_in_place(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 10)
    fork = kv_cache.fork(sequence)
    shared = sequence.pages
    PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=sequence)], kv_cache)
    PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=fork)], kv_cache)
    assert fork.pages == shared


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_source_and_fork_go_on_in_one_batch(runner: PrefillRunner, mode: Mode) -> None:
    sequence = prompted(runner)
    fork = runner.kv_cache.fork(sequence)
    chunks = [Chunk(token_ids=OWN, sequence=sequence), Chunk(token_ids=FORKED, sequence=fork)]
    batch = PrefillBatch.from_chunks(chunks, runner.kv_cache)
    own_V, forked_V = runner.prefill(batch, mode=mode).logits_BV.clone()
    torch.testing.assert_close(own_V, expected(runner, PROMPT + OWN))
    torch.testing.assert_close(forked_V, expected(runner, PROMPT + FORKED))


@pytest.mark.parametrize("tokens", [10, 9, 8, 5, 1])
def test_a_fork_goes_on_as_if_it_had_been_prefilled(runner: PrefillRunner, tokens: int) -> None:
    sequence = prompted(runner)
    fork = runner.kv_cache.fork(sequence, tokens)
    forked_V = prefill(runner, FORKED, fork)
    own_V = prefill(runner, OWN, sequence)
    torch.testing.assert_close(forked_V, expected(runner, PROMPT[:tokens] + FORKED))
    torch.testing.assert_close(own_V, expected(runner, PROMPT + OWN))


def test_a_source_that_recomputes_leaves_its_fork_alone(runner: PrefillRunner) -> None:
    sequence = prompted(runner)
    fork = runner.kv_cache.fork(sequence)
    chunk = Chunk(token_ids=[7] * 6, sequence=sequence, prefix_len=2)
    runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache))
    torch.testing.assert_close(prefill(runner, FORKED, fork), expected(runner, PROMPT + FORKED))
    torch.testing.assert_close(
        prefill(runner, OWN, sequence), expected(runner, [*PROMPT[:2], *[7] * 6, *OWN])
    )


def test_a_fork_survives_its_source_and_the_next_owner_of_its_pages(
    runner: PrefillRunner,
) -> None:
    sequence = prompted(runner)
    fork = runner.kv_cache.fork(sequence)
    chunk = Chunk(token_ids=FORKED, sequence=fork)
    batch = PrefillBatch.from_chunks([chunk], runner.kv_cache)
    runner.kv_cache.free(sequence)
    for _ in range(2):
        prefill(runner, [11] * 30, KVSequence())
    forked_V = runner.prefill(batch).logits_BV[0].clone()
    torch.testing.assert_close(forked_V, expected(runner, PROMPT + FORKED))


def test_a_batch_that_is_never_run_costs_a_fork_nothing(runner: PrefillRunner) -> None:
    sequence = prompted(runner)
    fork = runner.kv_cache.fork(sequence)
    for prefix in (0, 5, 10):
        chunk = Chunk(token_ids=[7] * 9, sequence=fork, prefix_len=prefix)
        PrefillBatch.from_chunks([chunk], runner.kv_cache)
    own_V, forked_V = both(runner, sequence, fork)
    torch.testing.assert_close(own_V, expected(runner, PROMPT + OWN))
    torch.testing.assert_close(forked_V, expected(runner, PROMPT + FORKED))


def test_a_prefill_that_fails_costs_the_others_nothing(make_runner: Make) -> None:
    runner = make_runner()
    sequence = prompted(runner)
    fork = runner.kv_cache.fork(sequence)

    def fail(layer: int) -> None:
        if layer == 1:
            raise BrokenError

    runner.backend.before_forward = fail
    with pytest.raises(BrokenError):
        prefill(runner, [7] * 5, fork)
    runner.backend.before_forward = lambda layer: None
    own_V, forked_V = both(runner, sequence, fork)
    torch.testing.assert_close(own_V, expected(runner, PROMPT + OWN))
    torch.testing.assert_close(forked_V, expected(runner, PROMPT + FORKED))


def test_when_pages_run_out_at_the_copy_nothing_is_taken(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 10)
    fork = kv_cache.fork(sequence)
    written_sequence(kv_cache, 4 * kv_cache.free_pages)
    with pytest.raises(KVCacheError, match=r"1 pages that are shared .* 0 of 31 are free: free a"):
        PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=fork)], kv_cache)
    assert fork.pages == sequence.pages
    assert kv_cache.owner_of(fork.pages[2]) == (sequence, fork)


def test_when_pages_run_out_later_a_copy_is_undone(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 10)
    fork = kv_cache.fork(sequence)
    chunks = [
        Chunk(token_ids=[1], sequence=fork),
        Chunk(token_ids=[1] * 200, sequence=KVSequence()),
    ]
    with pytest.raises(KVCacheError, match="200 tokens need 50 more pages"):
        PrefillBatch.from_chunks(chunks, kv_cache)
    assert fork.pages == sequence.pages
    assert kv_cache.free_pages == 28


def test_a_copy_that_fails_leaves_everything_as_it_was(
    kv_cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = written_sequence(kv_cache, 10)
    fork = kv_cache.fork(sequence)

    def fail(copies: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kv_cache, "copy_pages", fail)
    with pytest.raises(torch.OutOfMemoryError):
        PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=fork)], kv_cache)
    with pytest.raises(torch.OutOfMemoryError):
        kv_cache.unshare(fork, 0, 10)
    assert (fork.pages, kv_cache.free_pages) == (sequence.pages, 28)


def test_a_batch_made_before_what_it_writes_was_shared_is_refused(make_runner: Make) -> None:
    runner = make_runner()
    sequence = prompted(runner)
    chunk = Chunk(token_ids=OWN, sequence=sequence, prefix_len=3)
    batch = PrefillBatch.from_chunks([chunk], runner.kv_cache)
    fork = runner.kv_cache.fork(sequence)
    with pytest.raises(BatchError, match="request 0: it writes page 1, which another sequence"):
        runner.prefill(batch)
    torch.testing.assert_close(prefill(runner, FORKED, fork), expected(runner, PROMPT + FORKED))


def test_a_fork_made_during_a_prefill_is_right(make_runner: Make) -> None:
    runner = make_runner()
    sequence, forks = prompted(runner), []

    def fork(layer: int) -> None:
        forks.append(runner.kv_cache.fork(sequence))
        assert forks[-1].cached == 3

    runner.backend.before_forward = fork
    chunk = Chunk(token_ids=[7] * 6, sequence=sequence, prefix_len=3)
    runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache))
    runner.backend.before_forward = lambda layer: None
    assert sequence.cached == 9
    torch.testing.assert_close(
        prefill(runner, FORKED, forks[0]), expected(runner, PROMPT[:3] + FORKED)
    )


# Pages that the caller writes


def test_unsharing_copies_what_is_written(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 10)
    fork = kv_cache.fork(sequence)
    kv_cache.storage_L2PSKH.normal_()
    kv_cache.unshare(fork, 5, 10)
    assert fork.pages[0] == sequence.pages[0]
    assert not set(fork.pages[1:]) & set(sequence.pages)
    for own, others in zip(fork.pages, sequence.pages, strict=True):
        stored = kv_cache.storage_L2PSKH
        assert torch.equal(stored[:, :, own], stored[:, :, others])


def test_tokens_written_to_a_shared_page_do_not_count(kv_cache: PagedKVCache) -> None:
    fork = kv_cache.fork(written_sequence(kv_cache, 10))
    with pytest.raises(KVCacheError, match=r"tokens 10 to 11 lie in pages .* call unshare before"):
        kv_cache.mark_written(fork, 12)
    kv_cache.unshare(fork, 10, 12)
    kv_cache.mark_written(fork, 12)
    assert fork.cached == 12


def test_a_token_without_a_page_cannot_be_unshared(kv_cache: PagedKVCache) -> None:
    with pytest.raises(KVCacheError, match="has 3 pages of 4 tokens, not enough for 13: call ext"):
        kv_cache.unshare(written_sequence(kv_cache, 10), 0, 13)
