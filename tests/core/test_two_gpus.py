"""A runner whose device is not the current one: everything goes to its own, and nothing to the caller's.

Shape letters: R real tokens, B requests, D model dim, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Chunk,
    CUDASegmentEngine,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    eager_on_graph,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

HERE, THERE = 0, 1


@pytest.fixture
def runner(toy_model: Callable[..., Any]) -> PrefillRunner:
    """Return a captured runner on the second GPU, made while the first is current."""
    torch.cuda.set_device(HERE)
    model = toy_model(device=f"cuda:{THERE}")
    cache = PagedKVCache(model.spec, num_pages=32, page_size=4)
    runner = PrefillRunner(model, cache, "sdpa", buckets=[8, 16], max_requests=8)
    runner.capture()
    return runner


def batch_of(runner: PrefillRunner, *lengths: int) -> PrefillBatch:
    chunks = [Chunk(token_ids=[7] * n, sequence=KVSequence()) for n in lengths]
    return PrefillBatch.from_chunks(chunks, runner.kv_cache)


@pytest.mark.parametrize("lengths", [(8,), (3, 4), (1,), (9,)], ids=str)
def test_a_replay_has_the_bits_of_padded_eager(
    runner: PrefillRunner, lengths: tuple[int, ...]
) -> None:
    batch = batch_of(runner, *lengths)
    hidden_RD = runner.prefill(batch).hidden_RD.clone()
    assert torch.equal(hidden_RD, runner.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD)
    assert sum(runner.stats.replays.values()) == 1


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_the_runners_device_is_current_while_it_samples_and_the_callers_afterwards(
    runner: PrefillRunner, mode: Mode
) -> None:
    seen = []

    def sample(logits_BV: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_device())
        return logits_BV.argmax(-1)

    result = runner.prefill(batch_of(runner, 5), mode=mode, sample=sample)
    assert (seen, torch.cuda.current_device()) == ([THERE], HERE)
    assert result.next_tokens_B.device == torch.device("cuda", THERE)


def test_a_model_without_an_index_runs_where_its_cache_is(toy_model: Callable[..., Any]) -> None:
    with torch.cuda.device(THERE):
        model = toy_model(device="cuda")
        cache = PagedKVCache(model.spec, num_pages=32, page_size=4)
    runner = PrefillRunner(model, cache, "sdpa", buckets=[8], max_requests=8)
    runner.capture()
    assert runner.prefill(batch_of(runner, 5)).hidden_RD.device == cache.device
    assert runner.engine.device == cache.device


@pytest.fixture
def x() -> torch.Tensor:
    """Return what the bare graph reads; held here, as a graph does not hold it."""
    return torch.ones(64, device=f"cuda:{THERE}")


@pytest.fixture
def bare(x: torch.Tensor) -> tuple[BreakableCUDAGraph, torch.Tensor, list[int]]:
    """Capture on the second GPU while the first is current: graph, its result, and what its break found as current."""
    torch.cuda.set_device(HERE)
    seen = list[int]()

    @eager_on_graph
    def fresh() -> torch.Tensor:
        seen.append(torch.cuda.current_device())
        return torch.full((64,), 2.0, device="cuda")  # no index: the current device

    graph = BreakableCUDAGraph(CUDASegmentEngine(x.device))
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        result = x + fresh()
    return graph, result, seen


def test_a_bare_graph_replays_its_breaks_on_its_own_device(
    bare: tuple[BreakableCUDAGraph, torch.Tensor, list[int]],
) -> None:
    graph, result, seen = bare
    graph.replay()
    assert seen == [THERE, THERE]
    assert result.unique().tolist() == [3.0]
    assert torch.cuda.current_device() == HERE
