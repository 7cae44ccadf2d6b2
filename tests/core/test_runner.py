"""The runner at work: replays have the bits of padded eager, and say what they did.

Shape letters: T bucket (padded) tokens, R real tokens, B requests, D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    Admission,
    AttentionSpec,
    CaptureError,
    Chunk,
    KVSequence,
    Mode,
    PagedKVCache,
    Phase,
    PrefillBatch,
    PrefillRunner,
    TokenBuckets,
    greedy,
)

Make = Callable[..., Any]
SameBits = Callable[[Any, Any], None]

LENGTHS: dict[str, tuple[int, ...]] = {
    "one_token": (1,),
    "bucket_minus_1": (7,),
    "bucket": (8,),
    "bucket_plus_1": (9,),
    "two_requests": (3, 5),
    "two_requests_padded": (3, 4),
    "many_single_tokens": (1,) * 8,
    "largest_bucket": (16,),
    "mixed": (1, 6, 2, 4),
}


def outcome(runner: PrefillRunner, batch: PrefillBatch, mode: Mode) -> tuple[Tensor, ...]:
    """Prefill into an empty cache; return hidden states, logits, tokens and the cache, as copies."""
    runner.kv_cache.storage_L2PSKH.zero_()
    result = runner.prefill(batch, mode=mode)
    tensors = (result.hidden_RD, result.logits_BV, result.next_tokens_B)
    return tuple(t.clone() for t in (*tensors, runner.kv_cache.storage_L2PSKH))


# Against eager


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_replay_has_the_bits_of_padded_eager(
    make_runner: Make, make_batch: Make, assert_same_bits: SameBits, lengths: tuple[int, ...]
) -> None:
    runner, batch = make_runner(), make_batch(*lengths)
    replayed = outcome(runner, batch, Mode.BREAKABLE)
    assert_same_bits(replayed, outcome(runner, batch, Mode.PADDED_EAGER))
    assert sum(runner.stats.replays.values()) == 1


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_replay_agrees_with_eager_at_the_raw_shape(
    make_runner: Make, make_batch: Make, lengths: tuple[int, ...]
) -> None:
    runner, batch = make_runner(), make_batch(*lengths)
    hidden_RD, logits_BV, _, _ = outcome(runner, batch, Mode.BREAKABLE)
    eager_RD, eager_BV, _, _ = outcome(runner, batch, Mode.EAGER)
    torch.testing.assert_close(hidden_RD, eager_RD)
    torch.testing.assert_close(logits_BV, eager_BV)


def test_a_replay_agrees_with_a_runner_that_never_captured(
    make_runner: Make, make_batch: Make, assert_same_bits: SameBits
) -> None:
    batch = make_batch(3, 4)
    captured = outcome(make_runner(), batch, Mode.BREAKABLE)
    assert_same_bits(captured, outcome(make_runner(captured=False), batch, Mode.PADDED_EAGER))


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_requests_do_not_see_each_other(make_runner: Make, make_batch: Make, mode: Mode) -> None:
    runner = make_runner()
    together = runner.prefill(make_batch(3, 4, seed=5), mode=mode).logits_BV
    alone = [runner.prefill(make_batch(n, seed=s)).logits_BV for n, s in ((3, 5), (4, 6))]
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize(
    "order",
    [(8, 16, 8), (16, 8, 16), (5, 12, 5), (16, 1, 16), (7, 7, 7)],
    ids=lambda order: "-".join(map(str, order)),
)
def test_results_do_not_depend_on_what_was_replayed_before(
    make_runner: Make, make_batch: Make, order: tuple[int, ...]
) -> None:
    runner, batches = make_runner(), {n: make_batch(n, seed=n) for n in sorted(set(order))}
    first, _, last = (runner.prefill(batches[n]).logits_BV for n in order)
    assert torch.equal(first, last)


# Chunks and prefixes


def prefill_in_chunks(
    runner: PrefillRunner, tokens: Sequence[int], *sizes: int
) -> tuple[Tensor, KVSequence]:
    """Prefill ``tokens`` in chunks of ``sizes``; return the last chunk's logits and the sequence."""
    sequence, start = KVSequence(), 0
    for size in sizes:
        chunk = Chunk(token_ids=tokens[start : start + size], sequence=sequence)
        result = runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache))
        start += size
    return result.logits_BV, sequence


@pytest.mark.parametrize(
    "sizes",
    [(8, 8), (1, 15), (15, 1), (3, 5, 8), (4, 3, 2, 6, 1)],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_a_prompt_in_chunks_gives_the_result_of_one_pass(
    make_runner: Make, make_chunk: Make, sizes: tuple[int, ...]
) -> None:
    runner, tokens = make_runner(), make_chunk(16, seed=3).token_ids
    chunked, sequence = prefill_in_chunks(runner, tokens, *sizes)
    whole, _ = prefill_in_chunks(runner, tokens, 16)
    torch.testing.assert_close(chunked, whole)
    assert sequence.cached == 16


def test_a_prefix_longer_than_any_bucket_can_be_built_up(
    make_runner: Make, make_chunk: Make
) -> None:
    runner, tokens = make_runner(), make_chunk(60, seed=3).token_ids
    chunked, _ = prefill_in_chunks(runner, tokens, 16, 16, 16, 7, 5)
    whole, _ = prefill_in_chunks(runner, tokens, 60)
    torch.testing.assert_close(chunked, whole)
    assert runner.stats.replays == {16: 3, 8: 2}


def test_requests_with_and_without_a_prefix_share_a_batch(
    make_runner: Make, make_chunk: Make
) -> None:
    runner = make_runner()
    begun = make_chunk(5, seed=1)
    runner.prefill(PrefillBatch.from_chunks([begun], runner.kv_cache))
    chunks = [make_chunk(3, sequence=begun.sequence, seed=2), make_chunk(4, seed=3)]
    mixed = runner.prefill(PrefillBatch.from_chunks(chunks, runner.kv_cache)).logits_BV.clone()
    tokens = [*begun.token_ids, *chunks[0].token_ids]
    expected = [
        prefill_in_chunks(runner, tokens, 8)[0],
        prefill_in_chunks(runner, chunks[1].token_ids, 4)[0],
    ]
    torch.testing.assert_close(mixed, torch.cat(expected))


def test_a_prefill_counts_its_tokens_as_cached(make_runner: Make, make_chunk: Make) -> None:
    runner, chunks = make_runner(), [make_chunk(3), make_chunk(4)]
    runner.prefill(PrefillBatch.from_chunks(chunks, runner.kv_cache))
    assert [chunk.sequence.cached for chunk in chunks] == [3, 4]


def test_recomputing_from_a_shorter_prefix_gives_the_same_result(
    make_runner: Make, make_chunk: Make
) -> None:
    runner, chunk = make_runner(), make_chunk(8, seed=4)
    whole = runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache)).logits_BV.clone()
    again = Chunk(token_ids=chunk.token_ids[2:], sequence=chunk.sequence, prefix_len=2)
    result = runner.prefill(PrefillBatch.from_chunks([again], runner.kv_cache))
    torch.testing.assert_close(result.logits_BV, whole)
    assert chunk.sequence.cached == 8


# Capture


def test_a_report_describes_every_bucket_from_the_largest(make_runner: Make) -> None:
    report = make_runner(buckets=(4, 8, 16), captured=False).capture()
    assert [bucket.bucket for bucket in report.buckets] == [16, 8, 4]
    assert report.failed == {}
    assert report.memory_bytes > 0
    assert all(bucket.seconds > 0 for bucket in report.buckets)
    assert report.warm_up_seconds > 0


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_there_is_a_break_for_each_layer(
    make_runner: Make, toy_model: Callable[..., Any], kv_cache: PagedKVCache, layers: int
) -> None:
    model = toy_model(layers=layers)
    runner = PrefillRunner(
        model,
        PagedKVCache(model.spec, num_pages=8, page_size=4),
        make_runner(captured=False).backend,
        buckets=TokenBuckets([4, 8]),
    )
    buckets = runner.capture().buckets
    assert [bucket.breaks for bucket in buckets] == [layers] * 2
    assert [bucket.segments for bucket in buckets] == [layers + 1] * 2


def test_a_model_that_skips_the_break_shows_in_the_report(
    make_runner: Make, toy_model: type[Any]
) -> None:
    class Frozen(toy_model):
        """Attends inside of the segment, so that request boundaries are those of the capture."""

        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            ctx.attend = lambda layer: None
            try:
                return super().forward(input_ids_T, positions_T, ctx)
            finally:
                del ctx.attend

    report = make_runner(model=Frozen(), captured=False).capture()
    assert [bucket.breaks for bucket in report.buckets] == [0, 0]


def test_capture_runs_the_model_twice_for_each_bucket(
    make_runner: Make, toy_model: Callable[..., Any]
) -> None:
    model = toy_model()
    make_runner(model=model, buckets=(4, 8, 16))
    assert model.calls == 2 * 3


def test_warm_up_comes_before_every_capture(make_runner: Make, toy_model: type[Any]) -> None:
    phases: list[tuple[Phase, int]] = []

    class Noting(toy_model):
        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            phases.append((ctx.phase, len(input_ids_T)))
            return super().forward(input_ids_T, positions_T, ctx)

    make_runner(model=Noting())
    assert phases == [
        (Phase.WARM_UP, 16),
        (Phase.WARM_UP, 8),
        (Phase.CAPTURE, 16),
        (Phase.CAPTURE, 8),
    ]


def test_what_a_model_makes_at_its_first_call_is_made_in_warm_up(
    make_runner: Make, make_batch: Make, toy_model: type[Any]
) -> None:
    class Lazy(toy_model):
        table = None

        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            if self.table is None:
                self.table = torch.tensor([2.0])  # of host data, which a segment refuses
            return super().forward(input_ids_T, positions_T, ctx) * self.table

    runner, batch = make_runner(model=Lazy()), make_batch(3, 4)
    replayed = runner.prefill(batch).hidden_RD.clone()
    assert torch.equal(replayed, runner.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD)


def test_capture_leaves_the_cache_as_it_was_but_for_the_reserved_page(
    make_runner: Make, make_batch: Make, kv_cache: PagedKVCache
) -> None:
    runner = make_runner(captured=False)
    runner.prefill(make_batch(5))
    before = kv_cache.storage_L2PSKH[:, :, 1:].clone()
    runner.capture()
    assert torch.equal(kv_cache.storage_L2PSKH[:, :, 1:], before)


def test_capture_takes_no_pages(make_runner: Make, kv_cache: PagedKVCache) -> None:
    make_runner()
    assert kv_cache.free_pages == 31


def test_progress_counts_warm_ups_and_captures(make_runner: Make) -> None:
    steps: list[tuple[int, int]] = []
    make_runner(buckets=(4, 8, 16), captured=False).capture(
        progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(done, 6) for done in range(1, 7)]


def test_a_runner_captures_once(make_runner: Make) -> None:
    with pytest.raises(CaptureError, match=r"captured already: call release\(\) first"):
        make_runner().capture()


def test_release_drops_graphs_and_their_memory(make_runner: Make) -> None:
    runner = make_runner()
    assert runner.engine.memory_bytes() > 0
    runner.release()
    assert runner.graphs == {}
    assert runner.engine.memory_bytes() == 0


def test_after_release_prefills_run_eagerly(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    runner.release()
    assert runner.prefill(make_batch(3)).admission == Admission.eager("no bucket is captured")


def test_after_release_a_runner_captures_and_replays_anew(
    make_runner: Make, make_batch: Make, assert_same_bits: SameBits
) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    before = outcome(runner, batch, Mode.BREAKABLE)
    runner.release()
    runner.capture()
    assert_same_bits(outcome(runner, batch, Mode.BREAKABLE), before)
    assert runner.stats.replays == {8: 2}


def test_releasing_twice_does_nothing(make_runner: Make) -> None:
    runner = make_runner()
    runner.release()
    runner.release()
    assert runner.graphs == {}


def test_memory_does_not_grow_with_calls(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    before = runner.engine.memory_bytes()
    runner.prefill(make_batch(3))
    runner.prefill(make_batch(12))
    assert runner.engine.memory_bytes() == before


# Replay


def test_the_model_is_not_called_at_replay(
    make_runner: Make, make_batch: Make, toy_model: Callable[..., Any]
) -> None:
    model = toy_model()
    runner = make_runner(model=model)
    model.calls = 0
    runner.prefill(make_batch(3))
    runner.prefill(make_batch(12))
    assert model.calls == 0


def test_a_forward_says_what_it_is_for(make_runner: Make, make_batch: Make) -> None:
    runner, batch = make_runner(), make_batch(3)
    phases: list[Phase] = []
    runner.backend.before_forward = lambda layer: phases.append(runner.context.phase)
    runner.prefill(batch)
    runner.prefill(batch, mode=Mode.EAGER)
    assert phases == [Phase.REPLAY] * 2 + [Phase.EAGER] * 2


def test_replays_are_counted_by_bucket(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    for length in (3, 8, 9):
        runner.prefill(make_batch(length))
    assert runner.stats.replays == {8: 2, 16: 1}
    assert runner.stats.fallbacks == {}


@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.PADDED_EAGER], ids=lambda mode: mode.value)
def test_eager_prefills_that_were_asked_for_are_no_fallbacks(
    make_runner: Make, make_batch: Make, mode: Mode
) -> None:
    runner = make_runner()
    result = runner.prefill(make_batch(3), mode=mode)
    assert result.admission == Admission.eager("asked for")
    assert runner.stats.requested == {mode.value: 1}
    assert runner.stats.fallbacks == runner.stats.replays == {}


FALLBACKS: dict[str, tuple[bool, tuple[int, ...], str]] = {
    "nothing_captured": (False, (3,), "no bucket is captured"),
    "too_many_tokens": (True, (17,), "more tokens than the largest bucket (16)"),
    "too_many_tokens_of_several": (True, (9, 8), "more tokens than the largest bucket (16)"),
    "no_requests": (True, (), "no requests"),
    "no_requests_and_nothing_captured": (False, (), "no requests"),
}


@pytest.mark.parametrize(("captured", "lengths", "reason"), FALLBACKS.values(), ids=FALLBACKS)
def test_a_fallback_is_counted_with_its_reason(
    make_runner: Make,
    make_batch: Make,
    captured: bool,
    lengths: tuple[int, ...],
    reason: str,
) -> None:
    runner = make_runner(captured=captured)
    result = runner.prefill(make_batch(*lengths))
    assert result.admission == Admission.eager(reason)
    assert runner.stats.fallbacks == {reason: 1}
    assert runner.stats.replays == {}


@pytest.mark.parametrize("tokens", range(1, 19))
def test_the_bucket_that_is_announced_is_the_one_that_is_replayed(
    make_runner: Make, make_batch: Make, tokens: int
) -> None:
    runner, batch = make_runner(), make_batch(tokens)
    announced = runner.admit(batch)
    assert runner.prefill(batch).admission == announced
    assert announced.bucket == (8 if tokens <= 8 else 16 if tokens <= 16 else None)


def test_a_prefill_above_the_largest_bucket_is_right(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    together = runner.prefill(make_batch(15, 14, seed=5)).logits_BV
    alone = [runner.prefill(make_batch(n, seed=s)).logits_BV for n, s in ((15, 5), (14, 6))]
    torch.testing.assert_close(together, torch.cat(alone))


def test_a_prefill_above_the_largest_bucket_leaves_the_memory_of_graphs_alone(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    hidden_RD = runner.prefill(make_batch(16, seed=1)).hidden_RD
    boundary = runner.workspace.boundary.qkv_MX.clone()
    hidden = hidden_RD.clone()
    runner.prefill(make_batch(20, seed=2))
    assert torch.equal(runner.workspace.boundary.qkv_MX, boundary)
    assert torch.equal(hidden_RD, hidden)


# Results


def test_a_result_has_a_row_for_each_token_and_logits_for_each_request(
    make_runner: Make, make_batch: Make
) -> None:
    result = make_runner().prefill(make_batch(3, 4))
    assert result.hidden_RD.shape == (7, 16)
    assert result.logits_BV.shape == (2, 61)
    assert result.next_tokens_B.shape == (2,)
    assert result.next_tokens_B.dtype == torch.int64


def test_logits_are_those_of_the_last_row_of_each_request(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    result = runner.prefill(make_batch(3, 4))
    expected = runner.model.compute_logits(result.hidden_RD[[2, 6]])
    assert torch.equal(result.logits_BV, expected)


def test_the_next_token_is_the_likeliest_by_default(make_runner: Make, make_batch: Make) -> None:
    result = make_runner().prefill(make_batch(3, 4))
    assert torch.equal(result.next_tokens_B, result.logits_BV.argmax(-1))
    assert torch.equal(greedy(torch.tensor([[1.0, 3.0, 2.0]])), torch.tensor([1]))


def test_the_sampler_is_given_the_logits(make_runner: Make, make_batch: Make) -> None:
    result = make_runner().prefill(make_batch(3, 4), sample=lambda logits_BV: logits_BV.argmin(-1))
    assert torch.equal(result.next_tokens_B, result.logits_BV.argmin(-1))


def test_hidden_states_are_a_view_that_the_next_call_overwrites(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    hidden_RD = runner.prefill(make_batch(3, seed=1)).hidden_RD
    before = hidden_RD.clone()
    assert hidden_RD.data_ptr() == runner.workspace.hidden_MD.data_ptr()
    runner.prefill(make_batch(3, seed=2))
    assert not torch.equal(hidden_RD, before)


@pytest.mark.parametrize("name", ["logits_BV", "next_tokens_B"])
def test_logits_and_tokens_are_the_callers_own(
    make_runner: Make, make_batch: Make, name: str
) -> None:
    runner = make_runner()
    kept = getattr(runner.prefill(make_batch(3, seed=1)), name)
    before = kept.clone()
    runner.prefill(make_batch(3, seed=2))
    assert torch.equal(kept, before)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not_captured"])
def test_a_batch_without_requests_gives_an_empty_result(
    make_runner: Make, make_batch: Make, mode: Mode, captured: bool
) -> None:
    result = make_runner(captured=captured).prefill(make_batch(), mode=mode)
    assert (result.hidden_RD.shape, result.logits_BV.shape) == ((0, 16), (0, 61))
    assert result.next_tokens_B.tolist() == []


def test_a_batch_without_requests_reaches_no_backend(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    runner.backend.prepared.clear()
    runner.backend.seen.clear()
    runner.prefill(make_batch())
    assert runner.backend.prepared == runner.backend.seen == []


# Defaults


def test_the_default_buckets_go_up_to_what_the_cache_holds(
    toy_model: Callable[..., Any], kv_cache: PagedKVCache, make_backend: Make
) -> None:
    runner = PrefillRunner(toy_model(), kv_cache, make_backend())
    assert runner.buckets[-1] == 31 * 4


def test_the_default_buckets_go_up_to_2048_tokens(
    toy_model: Callable[..., Any], make_backend: Make
) -> None:
    model = toy_model()
    cache = PagedKVCache(model.spec, num_pages=600, page_size=4)
    assert PrefillRunner(model, cache, make_backend()).buckets[-1] == 2048


def test_limits_follow_from_cache_model_and_arguments(
    make_runner: Make, toy_model: Callable[..., Any]
) -> None:
    limits = make_runner(model=toy_model(max_positions=50), captured=False, max_requests=3).limits
    assert (limits.max_tokens, limits.max_requests) == (124, 3)
    assert (limits.max_context, limits.num_pages) == (50, 32)


def test_a_backend_can_be_given_by_name(
    toy_model: Callable[..., Any], kv_cache: PagedKVCache
) -> None:
    runner = PrefillRunner(toy_model(), kv_cache, "sdpa", buckets=TokenBuckets([8]))
    assert runner.backend.name == "sdpa"
    assert runner.backend.spec == AttentionSpec.of(runner.model.spec, page_size=4)
    assert runner.backend.limits is runner.limits
