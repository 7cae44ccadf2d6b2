"""What a runner refuses before anything runs: caches, buckets, modes, calls inside a capture."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bcg_core import (
    BucketError,
    KVCacheError,
    Mode,
    NestedCaptureError,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    TokenBuckets,
    eager_on_graph,
)

Make = Callable[..., Any]

# Caches

MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer_layers": ({"num_layers": 1}, "holds 1 layers of 2 KV heads of 8 elements"),
    "more_layers": ({"num_layers": 3}, "holds 3 layers of"),
    "heads": ({"num_kv_heads": 4}, "holds 2 layers of 4 KV heads of 8"),
    "head_dim": ({"head_dim": 16}, "holds 2 layers of 2 KV heads of 16 elements"),
    "dtype": ({"dtype": torch.bfloat16}, "8 elements, torch.bfloat16 on cpu"),
    "device": ({"device": torch.device("meta")}, "8 elements, torch.float32 on meta"),
}


@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=MISFITS)
def test_a_cache_that_does_not_fit_the_model_is_refused_with_both_shapes(
    make_runner: Make, toy_model: Make, changes: dict[str, Any], message: str
) -> None:
    cache = PagedKVCache(replace(toy_model().spec, **changes), num_pages=32, page_size=4)
    needed = "but the model needs 2 layers of 2 KV heads of 8 elements, torch.float32 on cpu"
    with pytest.raises(KVCacheError, match=f"{message}.*, {needed}"):
        make_runner(kv_cache=cache, captured=False)


def test_a_device_without_an_index_is_any_of_its_type(make_runner: Make, toy_model: Make) -> None:
    model = toy_model()
    model.spec = replace(model.spec, device=torch.device("cpu", 0))
    assert make_runner(model=model).graphs


# Buckets and requests


def test_buckets_may_be_a_plain_list(
    kv_cache: PagedKVCache, toy_model: Make, make_backend: Make
) -> None:
    runner = PrefillRunner(toy_model(), kv_cache, make_backend(), buckets=[8, 16])
    assert isinstance(runner.buckets, TokenBuckets)
    assert list(runner.buckets) == [8, 16]


@pytest.mark.parametrize("buckets", [[], [16, 8], [0], [8.0]], ids=str)
def test_a_list_that_is_no_ladder_is_refused(
    kv_cache: PagedKVCache, toy_model: Make, make_backend: Make, buckets: list[Any]
) -> None:
    with pytest.raises(BucketError):
        PrefillRunner(toy_model(), kv_cache, make_backend(), buckets=buckets)


@pytest.mark.parametrize("requests", [0, -1])
def test_a_runner_takes_at_least_one_request(make_runner: Make, requests: int) -> None:
    with pytest.raises(
        ValueError, match=f"max_requests is {requests}, but a batch has at least one"
    ):
        make_runner(max_requests=requests, captured=False)


# Modes


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_a_mode_may_be_given_by_its_value(make_runner: Make, make_batch: Make, mode: Mode) -> None:
    runner, batch = make_runner(), make_batch(3)
    by_value = runner.prefill(batch, mode=mode.value)
    assert by_value.admission == runner.prefill(batch, mode=mode).admission
    assert sum(runner.stats.replays.values()) + sum(runner.stats.requested.values()) == 2


@pytest.mark.parametrize("mode", ["fast", None, 1], ids=str)
def test_a_mode_that_does_not_exist_is_refused_before_anything_runs(
    make_runner: Make, make_batch: Make, mode: Any
) -> None:
    runner, batch = make_runner(), make_batch(3)
    before = runner.context.forwards
    with pytest.raises(
        ValueError, match="does not exist: use one of 'breakable', 'padded_eager', "
    ):
        runner.prefill(batch, mode=mode)
    assert runner.context.forwards == before
    assert batch.sequences[0].cached == 0


# Inside a capture


def test_a_prefill_inside_of_a_capture_is_refused(
    make_runner: Make, make_batch: Make, capture: Make
) -> None:
    runner, batch = make_runner(), make_batch(3)
    with pytest.raises(NestedCaptureError, match="prefill cannot be called inside a capture"):
        capture(lambda: runner.prefill(batch))
    assert batch.sequences[0].cached == 0


def test_a_prefill_in_a_break_is_refused_at_capture(
    make_runner: Make, make_batch: Make, capture: Make
) -> None:
    runner, batch = make_runner(), make_batch(3)
    with pytest.raises(NestedCaptureError, match="prefill cannot be called inside a capture"):
        capture(eager_on_graph(lambda: runner.prefill(batch)))


def test_a_runners_capture_inside_of_a_capture_is_refused(make_runner: Make, capture: Make) -> None:
    runner = make_runner(captured=False)
    with pytest.raises(NestedCaptureError, match="capture cannot be called inside a capture"):
        capture(runner.capture)
    assert runner.model.calls == 0
    assert runner.graphs == {}


# Batches whose sequences went on


def test_a_batch_of_a_sequence_that_only_grew_can_run_again(
    make_runner: Make, make_chunk: Make
) -> None:
    runner, first = make_runner(), make_chunk(6)
    batch = PrefillBatch.from_chunks([first], runner.kv_cache)
    runner.prefill(batch)
    longer = make_chunk(6, sequence=first.sequence)
    runner.prefill(PrefillBatch.from_chunks([longer], runner.kv_cache))
    runner.prefill(batch)
    assert first.sequence.cached == 6
