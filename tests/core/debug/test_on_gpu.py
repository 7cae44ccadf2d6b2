"""The debug tools on real CUDA graphs, where freed memory is freed and kernels are fused.

Shape letters: T bucket (padded) tokens.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Chunk,
    CUDASegmentEngine,
    HiddenOutputError,
    KVSequence,
    PagedKVCache,
    PrefillBatch,
    StaleTensorError,
    eager_on_graph,
)
from bcg_core.debug import PointerGuard, WatchedEngine, WatchedRunner
from bcg_llama import PRESETS, LlamaModel, random_llama

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Of torch itself, once torch.compile is used.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


@pytest.fixture
def graph() -> BreakableCUDAGraph:
    return BreakableCUDAGraph(WatchedEngine(CUDASegmentEngine()))


def test_intermediates_of_a_graph_are_not_guarded(graph: BreakableCUDAGraph) -> None:
    x = torch.ones(64, device="cuda")
    with BreakableCUDAGraphCapture(graph):
        for _ in range(10):
            x.copy_((x + 1) * 2 - x)
    graph.replay()
    torch.cuda.synchronize()


def test_a_tensor_that_was_freed_after_capture_is_refused(graph: BreakableCUDAGraph) -> None:
    x, held = torch.ones(64, device="cuda"), [torch.ones(64, device="cuda")]
    with BreakableCUDAGraphCapture(graph):
        x.add_(held[0])
    graph.replay()
    held.clear()
    with pytest.raises(StaleTensorError, match="was freed after capture"):
        graph.replay()


def test_a_swapped_weight_is_refused() -> None:
    owner = SimpleNamespace(weight=torch.ones(64, device="cuda"))
    graph = BreakableCUDAGraph(WatchedEngine(CUDASegmentEngine(), [PointerGuard({"it": owner})]))
    x = torch.ones(64, device="cuda")
    with BreakableCUDAGraphCapture(graph):
        x.mul_(owner.weight)
    graph.replay()
    owner.weight = owner.weight.clone()
    with pytest.raises(StaleTensorError, match=r"it\.weight was replaced"):
        graph.replay()


def test_a_side_channel_is_refused(graph: BreakableCUDAGraph) -> None:
    x, held = torch.ones(64, device="cuda"), []
    leave = eager_on_graph(lambda: held.append(x * 3))

    def capture() -> None:
        with BreakableCUDAGraphCapture(graph):
            leave()
            x.add_(held[0])

    with pytest.raises(HiddenOutputError):
        capture()
    with BreakableCUDAGraphCapture(graph):
        x.add_(1)
    graph.replay()


@pytest.fixture
def llama() -> LlamaModel:
    return random_llama(PRESETS["tiny"], dtype=torch.bfloat16, device=torch.device("cuda"))


@pytest.fixture
def runner(llama: LlamaModel) -> WatchedRunner:
    kv_cache = PagedKVCache(llama.spec, num_pages=16, page_size=16)
    runner = WatchedRunner(llama, kv_cache, "sdpa", buckets=[16, 64], max_requests=4)
    runner.capture()
    return runner


def prefill(runner: WatchedRunner, *lengths: int) -> Any:
    chunks = [Chunk(token_ids=range(length), sequence=KVSequence()) for length in lengths]
    return runner.prefill(PrefillBatch.from_chunks(chunks, runner.kv_cache))


def test_a_fused_llama_is_accepted(runner: WatchedRunner) -> None:
    assert prefill(runner, 20, 5).admission.bucket == 64
    assert prefill(runner, 9).admission.bucket == 16


def test_a_weight_that_a_fused_kernel_reads_is_refused_once_replaced(
    runner: WatchedRunner, llama: LlamaModel
) -> None:
    prefill(runner, 9)
    layer = llama.weights.layers[1]
    replacement: Tensor = layer.mlp_norm_D.clone()
    object.__setattr__(layer, "mlp_norm_D", replacement)  # the record is frozen
    with pytest.raises(
        StaleTensorError, match=r"weight model\.layers\.1\.post_attention_layernorm\.weight"
    ):
        prefill(runner, 9)
