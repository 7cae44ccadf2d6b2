"""NaN that one request leaves in its pages, and their next owner.

Shape letters: S slots of a request's pages, R new tokens, N query heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    Chunk,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    prefilling,
)
from bcg_harness.testing import MaskBackend, written_sequence

Make = Callable[..., Any]

SPOILT = 7
"""A token whose embedding is NaN."""


class MultipliesWholePages(AttentionBackend):
    """Load whole pages of a request, as kernels do, and multiply what lies behind its last token by 0."""

    name = "multiplies-whole-pages"
    capabilities = replace(MaskBackend.capabilities, supports_out=False, supports_full_graph=False)

    def init_forward_metadata(self, batch: PrefillBatch) -> PrefillBatch:
        return batch

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: PrefillBatch,
        out_RNH: Tensor | None,
    ) -> Tensor:
        result_RNH = torch.zeros(q_RNH.shape)  # what warm-up gets, whose batch has no pages
        for request, pages in enumerate(metadata.pages):
            start, stop = metadata.cu_new_lens[request : request + 2]
            keys_SNH, values_SNH = (
                side[list(pages)].flatten(0, 1).repeat_interleave(self.spec.group_size, dim=1)
                for side in (kv_cache.keys(layer), kv_cache.values(layer))
            )
            logits = torch.einsum("rnh,snh->nrs", q_RNH[start:stop], keys_SNH) * self.spec.scale
            future = torch.ones(logits.shape[1:], dtype=torch.bool)
            future = future.triu(metadata.prefix_lens[request] + 1)
            weights = logits.masked_fill(future, float("-inf")).softmax(-1)
            result_RNH[start:stop] = torch.einsum("nrs,snh->rnh", weights, values_SNH)
        return result_RNH


class TrustsWholePages(MultipliesWholePages):
    """Claim besides that this does no harm."""

    name = "trusts-whole-pages"
    capabilities = replace(MultipliesWholePages.capabilities, ignores_foreign_nan=True)


@pytest.fixture(params=["captured", "eager"])
def runner(
    request: pytest.FixtureRequest, make_runner: Make, make_backend: Make, toy_model: type[Any]
) -> PrefillRunner:
    """Return a runner whose backend depends on finite pages."""
    made: PrefillRunner = make_runner(
        model=spoilt(toy_model),
        backend=make_backend(MultipliesWholePages),
        captured=request.param == "captured",
    )
    return made


def spoilt(toy_model: type[Any]) -> Any:
    model = toy_model()
    model.embedding_VD[SPOILT] = float("nan")
    return model


def prefill(
    runner: PrefillRunner, tokens: list[int], sequence: KVSequence | None = None, **options: Any
) -> Tensor:
    chunk = Chunk(token_ids=tokens, sequence=sequence or KVSequence(), **options)
    hidden_RD = runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache)).hidden_RD
    return hidden_RD.clone()


def leave_nan(runner: PrefillRunner, *, length: int = 16) -> None:
    """Serve a request that writes NaN behind its first token, and free its pages."""
    sequence = KVSequence()
    assert prefill(runner, [1] + [SPOILT] * (length - 1), sequence).isnan().any()
    runner.kv_cache.free(sequence)


# The next owner


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 15, 16])
def test_the_next_owner_of_a_page_gets_what_a_fresh_cache_gives(
    runner: PrefillRunner, length: int
) -> None:
    expected = prefill(runner, [1, 2, 3] * 5 + [4] if length == 16 else [2] * length)
    runner.kv_cache.storage_L2PSKH.zero_()
    leave_nan(runner)
    found = prefill(runner, [1, 2, 3] * 5 + [4] if length == 16 else [2] * length)
    torch.testing.assert_close(found, expected)


def test_a_backend_that_claims_too_much_gets_nan(
    make_runner: Make, make_backend: Make, toy_model: type[Any]
) -> None:
    runner = make_runner(model=spoilt(toy_model), backend=make_backend(TrustsWholePages))
    leave_nan(runner)
    assert prefill(runner, [1, 2, 3]).isnan().any()


def test_without_the_guard_there_is_nan(
    runner: PrefillRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcg_core.runner.clear_tails", lambda batch: None)
    leave_nan(runner)
    assert prefill(runner, [1, 2, 3]).isnan().any()


def test_chunks_go_on_in_pages_of_others(runner: PrefillRunner) -> None:
    leave_nan(runner)
    sequence = KVSequence()
    for tokens in ([1, 2, 3], [4, 5, 6], [7 + 1] * 5, [9]):
        assert prefill(runner, tokens, sequence).isfinite().all()


def test_requests_of_one_batch_are_cleared_together(runner: PrefillRunner) -> None:
    for _ in range(2):
        leave_nan(runner)
    chunks = [Chunk(token_ids=[2] * n, sequence=KVSequence()) for n in (1, 3, 4, 6)]
    result = runner.prefill(PrefillBatch.from_chunks(chunks, runner.kv_cache))
    assert result.hidden_RD.isfinite().all()


def test_nan_of_tokens_that_were_taken_back_stays_with_them(runner: PrefillRunner) -> None:
    sequence = KVSequence()
    prefill(runner, [1, 2], sequence)
    prefill(runner, [SPOILT, SPOILT], sequence)
    assert prefill(runner, [3], sequence, prefix_len=2).isfinite().all()


def test_nan_of_a_request_that_went_back_stays_behind_it(runner: PrefillRunner) -> None:
    sequence = KVSequence()
    prefill(runner, [1, 2, 3, 4, 5], sequence)
    prefill(runner, [SPOILT, SPOILT], sequence)
    sequence.cached = 5
    assert prefill(runner, [6], sequence).isfinite().all()


@pytest.mark.parametrize("first", ["source", "fork"])
def test_nan_behind_a_fork_stays_with_its_source(runner: PrefillRunner, first: str) -> None:
    sequence = KVSequence()
    prefill(runner, [1, 2, 3, 4, 5], sequence)
    prefill(runner, [SPOILT, SPOILT], sequence)
    fork = runner.kv_cache.fork(sequence, 5)
    if first == "source":
        runner.kv_cache.free(sequence)
    assert prefill(runner, [6], fork).isfinite().all()


def test_clearing_spares_what_others_read(runner: PrefillRunner) -> None:
    leave_nan(runner)
    sequence = KVSequence()
    prefill(runner, [1, 2, 3, 4, 5, 6, 8], sequence)
    fork = runner.kv_cache.fork(sequence, 5)
    prefill(runner, [6], fork)
    expected = prefill(runner, [1, 2, 3, 4, 5, 6, 8, 9])[-1:]
    torch.testing.assert_close(prefill(runner, [9], sequence), expected)


def test_what_a_failed_prefill_wrote_is_cleared(runner: PrefillRunner) -> None:
    sequence = KVSequence()
    prefill(runner, [1, 2], sequence)

    def fail(logits_BV: Tensor) -> Tensor:
        raise KeyError

    chunk = Chunk(token_ids=[SPOILT] * 6, sequence=sequence)
    with pytest.raises(KeyError):
        runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache), sample=fail)
    assert prefill(runner, [3], sequence).isfinite().all()


def test_a_full_graph_finds_clean_pages(
    make_runner: Make, make_backend: Make, toy_model: type[Any]
) -> None:
    runner = make_runner(
        model=spoilt(toy_model), backend=make_backend(MaskBackend), full_graph=True
    )
    leave_nan(runner, length=4)
    assert prefill(runner, [1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_pages_are_clean_in_every_mode(
    make_runner: Make, make_backend: Make, toy_model: type[Any], mode: Mode
) -> None:
    runner = make_runner(model=spoilt(toy_model), backend=make_backend(MultipliesWholePages))
    leave_nan(runner)
    chunk = Chunk(token_ids=[1, 2, 3], sequence=KVSequence())
    batch = PrefillBatch.from_chunks([chunk], runner.kv_cache)
    assert runner.prefill(batch, mode=mode).hidden_RD.isfinite().all()


def test_nan_of_padded_rows_reaches_no_page_of_a_request(
    make_runner: Make, make_backend: Make, toy_model: type[Any]
) -> None:
    model = toy_model()
    model.embedding_VD[0] = float("nan")
    runner = make_runner(model=model, backend=make_backend(MultipliesWholePages))
    for _ in range(2):
        assert prefill(runner, [1, 2, 3]).isfinite().all()
    assert runner.kv_cache.keys(0)[0].isnan().any()
    assert runner.kv_cache.storage_L2PSKH[:, :, 1:].isfinite().all()


# What it costs


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch, kv_cache: PagedKVCache) -> list[list[int]]:
    """Collect the slots of each call that clears some."""
    calls: list[list[int]] = []
    clear = kv_cache.clear_slots
    monkeypatch.setattr(kv_cache, "clear_slots", lambda slots: (calls.append(slots), clear(slots)))
    return calls


def test_a_page_is_cleared_once_behind_the_last_token(
    make_runner: Make, make_backend: Make, cleared: list[list[int]]
) -> None:
    runner = make_runner(backend=make_backend(MultipliesWholePages))
    runner.kv_cache.free(written_sequence(runner.kv_cache, 4))
    sequence = KVSequence()
    prefill(runner, [1], sequence)
    prefill(runner, [2], sequence)
    prefill(runner, [3, 4], sequence)
    assert cleared == [[5, 6, 7]]


@pytest.mark.parametrize("length", [4, 8])
def test_full_pages_are_not_cleared(
    make_runner: Make, make_backend: Make, cleared: list[list[int]], length: int
) -> None:
    runner = make_runner(backend=make_backend(MultipliesWholePages))
    runner.kv_cache.free(written_sequence(runner.kv_cache, 8))
    prefill(runner, [1] * length)
    assert cleared == []


def test_pages_that_nobody_had_are_not_cleared(
    make_runner: Make, make_backend: Make, cleared: list[list[int]]
) -> None:
    prefill(make_runner(backend=make_backend(MultipliesWholePages)), [1, 2, 3])
    assert cleared == []


def test_nothing_is_cleared_for_a_backend_that_ignores_nan(
    make_runner: Make, cleared: list[list[int]]
) -> None:
    runner = make_runner()
    runner.use_backend("sdpa")
    assert runner.backend.capabilities.ignores_foreign_nan
    runner.kv_cache.free(written_sequence(runner.kv_cache, 8))
    prefill(runner, [1, 2, 3])
    assert cleared == []


# Pages that the caller hands out


def test_a_page_is_zeroed_when_it_is_reserved(kv_cache: PagedKVCache) -> None:
    kv_cache.storage_L2PSKH.fill_(float("nan"))
    kv_cache.reserve([3, 5])
    assert not kv_cache.storage_L2PSKH[:, :, [3, 5]].any()
    assert kv_cache.storage_L2PSKH[:, :, 4].isnan().all()


def test_the_caller_clears_what_changes_hands_between_its_requests(
    make_runner: Make, make_backend: Make, toy_model: type[Any]
) -> None:
    runner = make_runner(model=spoilt(toy_model), backend=make_backend(MultipliesWholePages))

    def raw(tokens: list[int]) -> Tensor:
        batch = PrefillBatch.build(
            input_ids=tokens, new_lens=[len(tokens)], page_table=[[3]], kv_cache=runner.kv_cache
        )
        hidden_RD: Tensor = runner.prefill(batch).hidden_RD
        return hidden_RD

    raw([1, 2, SPOILT])
    runner.kv_cache.clear([3])
    assert raw([1, 2]).isfinite().all()


@pytest.mark.parametrize("pages", [[1], [32], [-1]], ids=str)
def test_pages_of_sequences_are_not_cleared(kv_cache: PagedKVCache, pages: list[int]) -> None:
    written_sequence(kv_cache, 4)
    kv_cache.storage_L2PSKH.fill_(1)
    with pytest.raises(ValueError, match=r"cannot be cleared: they must be among 0 to 31, and no"):
        kv_cache.clear(pages)
    assert kv_cache.storage_L2PSKH.all()


def test_pages_of_a_freed_sequence_are_known_to_be_unclean(kv_cache: PagedKVCache) -> None:
    sequence = written_sequence(kv_cache, 8)
    pages = set(sequence.pages)
    kv_cache.free(sequence)
    assert kv_cache.holders.unclean == pages
    assert prefilling.clear_tails(PrefillBatch.from_chunks([], kv_cache)) is None
