"""The runner and mistakes: a clear error, nothing lost, usable afterwards."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    Admission,
    BackendContractError,
    BatchError,
    Chunk,
    CPUSegmentEngine,
    HostReadError,
    KVSequence,
    Mode,
    ModelSpec,
    PagedKVCache,
    PrefillBatch,
)
from bcg_harness.testing import written_sequence

Make = Callable[..., Any]


class MistakeError(Exception):
    """What user code raises here."""


def still_works(runner: Any, make_batch: Make) -> None:
    """Check that the runner replays as padded eager does."""
    batch = make_batch(3, 4)
    replayed = runner.prefill(batch)
    assert replayed.admission == Admission.replay(8)
    logits_BV = replayed.logits_BV
    assert torch.equal(logits_BV, runner.prefill(batch, mode=Mode.PADDED_EAGER).logits_BV)


# Batches that do not fit


def batch_with(kv_cache: PagedKVCache, *tokens: list[int]) -> PrefillBatch:
    return PrefillBatch.from_chunks(
        [Chunk(token_ids=ids, sequence=KVSequence()) for ids in tokens], kv_cache
    )


WRONG: dict[str, tuple[Callable[[PagedKVCache], PrefillBatch], str]] = {
    "token_beyond_the_vocabulary": (
        lambda cache: batch_with(cache, [1, 2], [3, 61]),
        "request 1: token id 61 is not in the vocabulary of 61",
    ),
    "negative_token": (
        lambda cache: batch_with(cache, [1, -1], [3]),
        "request 0: token id -1 is not in the vocabulary of 61",
    ),
    "first_of_several_wrong_tokens": (
        lambda cache: batch_with(cache, [1], [2, 99, 3], [77]),
        "request 1: token id 99 is not",
    ),
    "context_beyond_the_positions": (
        lambda cache: batch_with(cache, [1], [2] * 65),
        "request 1: 65 tokens with its prefix, but the model's RoPE table has 64 positions",
    ),
    "prefix_and_new_tokens_beyond_the_positions": (
        lambda cache: PrefillBatch.from_chunks(
            [Chunk(token_ids=[1, 2], sequence=cached_tokens(cache, 63))], cache
        ),
        "request 0: 65 tokens with its prefix",
    ),
    "too_many_requests": (
        lambda cache: batch_with(cache, *[[1]] * 9),
        "9 requests, at most 8 fit: split the batch, or raise max_requests",
    ),
    "other_page_size": (
        lambda cache: batch_with(other_cache(page_size=8), [1]),
        "another KV cache, of 32 pages of 8 tokens on cpu; this runner's cache has 32 of 4 on cpu",
    ),
    "larger_cache": (
        lambda cache: batch_with(other_cache(num_pages=64), [1]),
        "another KV cache, of 64 pages of 4 tokens on cpu; this runner's cache has 32 of 4 on cpu",
    ),
    "other_device": (
        lambda cache: replace(batch_with(cache, [1]), device=torch.device("meta")),
        "tokens on meta; this runner's cache has 32 of 4 on cpu",
    ),
    "another_cache_of_that_size": (
        lambda cache: batch_with(other_cache(), [1]),
        "another KV cache, of 32 pages of 4 tokens on cpu; this runner's cache has 32 of 4 on cpu",
    ),
    "pages_that_went_to_another_sequence": (
        lambda cache: stale_batch(cache),
        "request 1: made before its sequence changed; build the batch again",
    ),
    "prefix_that_is_no_longer_cached": (
        lambda cache: batch_behind_a_lost_prefix(cache),
        "request 0: made before its sequence changed; build the batch again",
    ),
}


def cached_tokens(kv_cache: PagedKVCache, count: int) -> KVSequence:
    return written_sequence(kv_cache, count)


def stale_batch(kv_cache: PagedKVCache) -> PrefillBatch:
    """Return a batch whose second sequence was freed since, and its pages given to another."""
    sequences = [KVSequence(), KVSequence()]
    batch = PrefillBatch.from_chunks(
        [Chunk(token_ids=[1] * 9, sequence=sequence) for sequence in sequences], kv_cache
    )
    kv_cache.free(sequences[1])
    kv_cache.extend(KVSequence(), 9)
    return batch


def batch_behind_a_lost_prefix(kv_cache: PagedKVCache) -> PrefillBatch:
    """Return a batch whose sequence has the same pages as then, but nothing cached."""
    sequence = cached_tokens(kv_cache, 6)
    batch = PrefillBatch.from_chunks([Chunk(token_ids=[1], sequence=sequence)], kv_cache)
    kv_cache.free(sequence)
    kv_cache.extend(sequence, 7)
    return batch


def other_cache(**changes: int) -> PagedKVCache:
    spec = ModelSpec(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=16,
        vocab_size=61,
        max_positions=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return PagedKVCache(spec, **({"num_pages": 32, "page_size": 4} | changes))


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_a_batch_that_does_not_fit_is_refused(
    make_runner: Make,
    make_batch: Make,
    kv_cache: PagedKVCache,
    make: Callable[[PagedKVCache], PrefillBatch],
    message: str,
    mode: Mode,
) -> None:
    runner, batch = make_runner(), make(kv_cache)
    with pytest.raises(BatchError, match=message):
        runner.prefill(batch, mode=mode)


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_a_refused_batch_changes_nothing(
    make_runner: Make,
    make_batch: Make,
    kv_cache: PagedKVCache,
    make: Callable[[PagedKVCache], PrefillBatch],
    message: str,
) -> None:
    runner, batch = make_runner(), make(kv_cache)
    cached = [sequence.cached for sequence in batch.sequences]
    storage = kv_cache.storage_L2PSKH.clone()
    with pytest.raises(BatchError):
        runner.prefill(batch)
    assert [sequence.cached for sequence in batch.sequences] == cached
    assert torch.equal(kv_cache.storage_L2PSKH, storage)
    assert runner.stats.replays == runner.stats.fallbacks == {}
    still_works(runner, make_batch)


@pytest.mark.parametrize("tokens", [[0, 60], [60], [0]], ids=str)
def test_the_edges_of_the_vocabulary_are_in_it(
    make_runner: Make, kv_cache: PagedKVCache, tokens: list[int]
) -> None:
    result = make_runner().prefill(batch_with(kv_cache, tokens))
    assert result.admission == Admission.replay(8)


def test_a_context_of_exactly_all_positions_fits(make_runner: Make, kv_cache: PagedKVCache) -> None:
    result = make_runner().prefill(batch_with(kv_cache, [1] * 64))
    assert result.hidden_RD.shape == (64, 16)


# Exceptions in a backend


@pytest.mark.parametrize("layer", [0, 1])
def test_an_exception_in_a_backend_at_replay_reaches_the_caller_with_its_break(
    make_runner: Make, make_batch: Make, layer: int
) -> None:
    runner, error = make_runner(), MistakeError("as it is")
    runner.backend.before_forward = fail_at(layer, error)
    with pytest.raises(MistakeError, match="as it is") as caught:
        runner.prefill(make_batch(3))
    assert caught.value is error
    assert error.__notes__ == [
        f"raised in layer {layer} of attention backend 'toy'",
        f"raised at replay in break {layer} (attention)",
    ]


def fail_at(layer: int, error: Exception) -> Callable[[int], None]:
    def fail(at: int) -> None:
        if at == layer:
            raise error

    return fail


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_an_exception_in_a_backend_leaves_cached_counts_alone(
    make_runner: Make, make_chunk: Make, mode: Mode
) -> None:
    runner = make_runner()
    begun = make_chunk(5)
    runner.prefill(PrefillBatch.from_chunks([begun], runner.kv_cache))
    runner.backend.before_forward = fail_at(1, MistakeError())
    chunks = [make_chunk(3, sequence=begun.sequence), make_chunk(2)]
    with pytest.raises(MistakeError):
        runner.prefill(PrefillBatch.from_chunks(chunks, runner.kv_cache), mode=mode)
    assert [chunk.sequence.cached for chunk in chunks] == [5, 0]


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_a_runner_works_after_an_exception_in_a_backend(
    make_runner: Make, make_batch: Make, mode: Mode
) -> None:
    runner = make_runner()
    runner.backend.before_forward = fail_at(1, MistakeError())
    with pytest.raises(MistakeError):
        runner.prefill(make_batch(6), mode=mode)
    runner.backend.before_forward = lambda layer: None
    still_works(runner, make_batch)


def test_a_failed_prefill_is_not_counted(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    runner.backend.before_forward = fail_at(0, MistakeError())
    with pytest.raises(MistakeError):
        runner.prefill(make_batch(6))
    assert runner.stats.replays == runner.stats.fallbacks == {}


def test_a_failed_chunk_can_be_prefilled_again(make_runner: Make, make_chunk: Make) -> None:
    runner, chunk = make_runner(), make_chunk(6)
    batch = PrefillBatch.from_chunks([chunk], runner.kv_cache)
    runner.backend.before_forward = fail_at(1, MistakeError())
    with pytest.raises(MistakeError):
        runner.prefill(batch)
    runner.backend.before_forward = lambda layer: None
    again = runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache)).logits_BV
    fresh = Chunk(token_ids=chunk.token_ids, sequence=KVSequence())
    expected = runner.prefill(PrefillBatch.from_chunks([fresh], runner.kv_cache)).logits_BV
    assert torch.equal(again, expected)


def test_an_exception_while_preparing_metadata_leaves_the_runner_usable(
    make_runner: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    with monkeypatch.context() as patch:
        patch.setattr(runner.backend, "update_bucket_metadata", fail_with(MistakeError()))
        with pytest.raises(MistakeError) as caught:
            runner.prefill(make_batch(3))
    assert caught.value.__notes__ == ["raised while preparing a batch for backend 'toy'"]
    still_works(runner, make_batch)


def fail_with(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_a_backend_that_returns_padded_rows_breaks_the_contract(
    make_runner: Make, make_batch: Make, mode: Mode
) -> None:
    runner = make_runner()
    runner.backend.forward = lambda *arguments: torch.zeros(16, 4, 8)
    with pytest.raises(BackendContractError, match=r"'toy': layer 0: .*expected \(3, 4, 8\)"):
        runner.prefill(make_batch(3), mode=mode)
    del runner.backend.forward
    still_works(runner, make_batch)


# Exceptions behind the layers


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_an_exception_in_the_sampler_leaves_cached_counts_alone(
    make_runner: Make, make_chunk: Make, make_batch: Make, mode: Mode
) -> None:
    runner, chunk = make_runner(), make_chunk(3)
    batch = PrefillBatch.from_chunks([chunk], runner.kv_cache)
    with pytest.raises(MistakeError):
        runner.prefill(batch, mode=mode, sample=fail_with(MistakeError()))
    assert chunk.sequence.cached == 0
    assert runner.stats.replays == runner.stats.requested == {}
    still_works(runner, make_batch)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_an_exception_in_the_head_leaves_cached_counts_alone(
    make_runner: Make,
    make_chunk: Make,
    make_batch: Make,
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
) -> None:
    runner, chunk = make_runner(), make_chunk(3)
    batch = PrefillBatch.from_chunks([chunk], runner.kv_cache)
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "compute_logits", fail_with(MistakeError()))
        with pytest.raises(MistakeError):
            runner.prefill(batch, mode=mode)
    assert chunk.sequence.cached == 0
    still_works(runner, make_batch)


# Captures that fail


def failing_model(toy_model: type[Any], fails: Callable[[Any, int], Exception | None]) -> Any:
    """Return a toy model that raises what ``fails(context, padded tokens)`` returns, between its layers."""

    class Failing(toy_model):
        armed = True

        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            hidden_TD = super().forward(input_ids_T, positions_T, ctx)
            error = fails(ctx, len(input_ids_T)) if self.armed else None
            if error is not None:
                raise error
            return hidden_TD

    return Failing()


PHASES = ["warm-up", "capture"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_while_capturing_reaches_the_caller_and_leaves_no_graph(
    make_runner: Make, toy_model: type[Any], phase: str
) -> None:
    error = MistakeError("as it is")
    model = failing_model(
        toy_model, lambda ctx, padded: error if (ctx.phase.value, padded) == (phase, 8) else None
    )
    runner = make_runner(model=model, captured=False)
    with pytest.raises(MistakeError) as caught:
        runner.capture()
    assert caught.value is error
    where = {"warm-up": "in warm-up", "capture": "at capture"}[phase]
    assert error.__notes__ == [f"raised {where} of bucket 8"]
    assert runner.graphs == {}


@pytest.mark.parametrize("phase", PHASES)
def test_after_a_failed_capture_prefills_run_eagerly_and_the_next_capture_works(
    make_runner: Make, make_batch: Make, toy_model: type[Any], phase: str
) -> None:
    model = failing_model(
        toy_model,
        lambda ctx, padded: MistakeError() if (ctx.phase.value, padded) == (phase, 8) else None,
    )
    runner = make_runner(model=model, captured=False)
    with pytest.raises(MistakeError):
        runner.capture()
    assert runner.prefill(make_batch(3)).admission == Admission.eager("no bucket is captured")
    model.armed = False
    runner.capture()
    still_works(runner, make_batch)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("warm_up", "raised in warm-up of backend 'toy'"),
        ("init_bucket_metadata", "raised while making bucket metadata of backend 'toy'"),
    ],
    ids=["warm_up", "init_bucket_metadata"],
)
def test_a_backend_that_cannot_be_prepared_leaves_no_graph(
    make_runner: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch, name: str, note: str
) -> None:
    runner = make_runner(captured=False)
    with monkeypatch.context() as patch:
        patch.setattr(runner.backend, name, fail_with(MistakeError()))
        with pytest.raises(MistakeError) as caught:
            runner.capture()
    assert caught.value.__notes__ == [note]
    assert runner.graphs == {}
    assert runner.prefill(make_batch(3)).admission == Admission.eager("no bucket is captured")
    runner.capture()
    still_works(runner, make_batch)


def test_an_exception_in_the_progress_callback_leaves_no_graph(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner(captured=False)
    with pytest.raises(MistakeError):
        runner.capture(progress=fail_with(MistakeError()))
    assert runner.graphs == {}
    runner.capture()
    still_works(runner, make_batch)


def test_a_model_that_reads_on_the_host_is_refused_at_capture(
    make_runner: Make, make_batch: Make, toy_model: type[Any]
) -> None:
    class Reading(toy_model):
        reads = True

        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            hidden_TD = super().forward(input_ids_T, positions_T, ctx)
            return hidden_TD / hidden_TD.amax().item() if self.reads else hidden_TD

    runner = make_runner(model=Reading(), captured=False)
    with pytest.raises(HostReadError, match="eager_on_graph"):
        runner.capture()
    assert runner.graphs == {}
    runner.model.reads = False
    runner.capture()
    still_works(runner, make_batch)


# Out of memory


def out_of_memory(size: int, phase: str) -> Callable[[Any, int], Exception | None]:
    def fails(ctx: Any, padded: int) -> Exception | None:
        if (ctx.phase.value, padded) == (phase, size):
            return torch.OutOfMemoryError("no room for it")
        return None

    return fails


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_bucket_that_runs_out_of_memory_is_left_out_and_reported(
    make_runner: Make, toy_model: type[Any], size: int, phase: str
) -> None:
    model = failing_model(toy_model, out_of_memory(size, phase))
    runner = make_runner(model=model, buckets=(4, 8, 16), captured=False)
    report = runner.capture()
    rest = [other for other in (16, 8, 4) if other != size]
    assert [bucket.bucket for bucket in report.buckets] == rest
    assert list(runner.graphs) == rest
    assert report.failed == {size: "out of memory: no room for it"}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4, Admission.replay(8)),
        (8, Admission.replay(4)),
        (16, Admission.replay(4)),
    ],
)
def test_batches_of_a_missing_bucket_go_to_a_larger_one(
    make_runner: Make,
    make_batch: Make,
    toy_model: type[Any],
    size: int,
    phase: str,
    expected: Admission,
) -> None:
    model = failing_model(toy_model, out_of_memory(size, phase))
    runner = make_runner(model=model, buckets=(4, 8, 16), captured=False)
    runner.capture()
    assert runner.admit(make_batch(3)) == expected


def test_a_capture_that_runs_out_of_memory_takes_nothing_from_the_kv_cache(
    make_runner: Make, make_batch: Make, toy_model: type[Any], kv_cache: PagedKVCache
) -> None:
    # The cache is the caller's, and as large as it will be: graphs take of what is left, or go without.
    model = failing_model(toy_model, out_of_memory(16, "capture"))
    runner = make_runner(model=model, captured=False)
    runner.prefill(make_batch(5))
    storage, pages = kv_cache.storage_L2PSKH, kv_cache.free_pages
    before = storage[:, :, 1:].clone()
    assert list(runner.capture().failed) == [16]
    assert kv_cache.storage_L2PSKH is storage
    assert torch.equal(storage[:, :, 1:], before)
    assert kv_cache.free_pages == pages


def test_batches_beyond_a_missing_largest_bucket_run_eagerly(
    make_runner: Make, make_batch: Make, toy_model: type[Any]
) -> None:
    model = failing_model(toy_model, out_of_memory(16, "capture"))
    runner = make_runner(model=model, captured=False)
    runner.capture()
    reason = "more tokens than the largest bucket (8)"
    assert runner.prefill(make_batch(12)).admission == Admission.eager(reason)
    still_works(runner, make_batch)


def test_padded_eager_pads_as_the_replay_does_where_a_bucket_is_missing(
    make_runner: Make, make_batch: Make, toy_model: type[Any], assert_same_bits: Make
) -> None:
    model = failing_model(toy_model, out_of_memory(4, "capture"))
    runner = make_runner(model=model, buckets=(4, 8, 16), captured=False)
    runner.capture()
    padded: list[int] = []
    runner.backend.before_forward = lambda layer: padded.append(len(runner.context.io.out_TX))
    runner.prefill(make_batch(3))
    runner.prefill(make_batch(3), mode=Mode.PADDED_EAGER)
    assert padded == [8] * 4


def test_progress_counts_a_missing_bucket_as_done(make_runner: Make, toy_model: type[Any]) -> None:
    steps: list[int] = []
    model = failing_model(toy_model, out_of_memory(16, "warm-up"))
    runner = make_runner(model=model, captured=False)
    runner.capture(progress=lambda done, total: steps.append(done))
    assert steps == [1, 2, 3, 4]


def test_a_runner_without_memory_for_any_bucket_runs_eagerly_and_can_capture_later(
    make_runner: Make, make_batch: Make, toy_model: type[Any]
) -> None:
    model = failing_model(toy_model, lambda ctx, padded: torch.OutOfMemoryError("full"))
    runner = make_runner(model=model, captured=False)
    report = runner.capture()
    assert report.buckets == ()
    assert set(report.failed) == {8, 16}
    model.armed = False
    assert runner.prefill(make_batch(3)).admission == Admission.eager("no bucket is captured")
    runner.capture()
    still_works(runner, make_batch)


def test_an_engine_that_runs_out_of_memory_loses_that_bucket_alone(
    make_runner: Make, make_batch: Make
) -> None:
    class Tight(CPUSegmentEngine):
        ends = 0

        def end(self) -> Any:
            self.ends += 1
            if self.ends == 2:
                raise torch.OutOfMemoryError("second segment of the largest bucket")
            return super().end()

    runner = make_runner(engine=Tight(), captured=False)
    report = runner.capture()
    assert list(report.failed) == [16]
    assert list(runner.graphs) == [8]
    still_works(runner, make_batch)
