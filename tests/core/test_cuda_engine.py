"""The contracts of the CPU engine's tests, on real CUDA graphs.

Shape letters: T bucket (padded) tokens.
"""

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Chunk,
    CUDASegmentEngine,
    KVSequence,
    Mode,
    NestedCaptureError,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    TokenBuckets,
    break_graph,
    eager_on_graph,
)
from bcg_core.debug.syncs import synchronisation

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MIB = 1 << 20
Work = Callable[[], Any]


class MistakeError(Exception):
    """What user code raises here."""


@pytest.fixture
def engine() -> CUDASegmentEngine:
    return CUDASegmentEngine()


def warm_up(engine: CUDASegmentEngine, work: Work) -> None:
    with torch.no_grad(), engine.warming_up():
        work()


def capture(engine: CUDASegmentEngine, work: Work) -> tuple[BreakableCUDAGraph, Any]:
    """Warm up and capture ``work``; return the graph and what ``work`` returned at capture."""
    warm_up(engine, work)
    graph = BreakableCUDAGraph(engine)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        result = work()
    return graph, result


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


# Replay

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w: torch.mm(x, w),
    "mm_out": lambda x, w: torch.mm(x, w, out=torch.empty_like(x)),
    "linear": lambda x, w: F.linear(x, w),
    "rms_norm": lambda x, w: F.rms_norm(x, (64,), w[0]),
    "softmax": lambda x, w: x.softmax(-1),
    "silu_mul": lambda x, w: F.silu(x[:, :32]) * x[:, 32:],
    "index_select": lambda x, w: x.index_select(0, torch.arange(15, -1, -1, device="cuda")),
    "cat": lambda x, w: torch.cat([x, w]),
    "in_place": lambda x, w: x.clone().mul_(3).add_(x),
    "copy_into_a_view": lambda x, w: torch.zeros(2, 16, 64, device="cuda")[1].copy_(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_replay_has_the_bits_of_eager_on_new_inputs(
    engine: CUDASegmentEngine, operation: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    x, w = normal(16, 64, dtype=dtype), normal(64, 64, dtype=dtype)
    graph, replayed = capture(engine, lambda: operation(x, w))
    x.copy_(normal(16, 64, dtype=dtype))
    graph.replay()
    assert torch.equal(replayed, operation(x, w))


def test_a_capture_computes_nothing(engine: CUDASegmentEngine) -> None:
    x = ones(4)
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        x.add_(1)
    torch.cuda.synchronize()
    assert x.tolist() == [1] * 4
    graph.replay()
    assert x.tolist() == [2] * 4


def test_python_does_not_run_at_replay_and_results_keep_their_address(
    engine: CUDASegmentEngine,
) -> None:
    x, runs = ones(4), []
    graph, y = capture(engine, lambda: (runs.append(1), x + 1)[1])
    address, count = y.data_ptr(), len(runs)
    x.fill_(5)
    graph.replay()
    assert (y.data_ptr(), len(runs)) == (address, count)
    assert y.tolist() == [6] * 4


def test_random_numbers_differ_from_replay_to_replay(engine: CUDASegmentEngine) -> None:
    graph, drawn = capture(engine, lambda: torch.rand(64, device="cuda"))
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(drawn, first)


def test_a_replay_follows_the_callers_stream(engine: CUDASegmentEngine) -> None:
    x = ones(1 << 20)
    graph, y = capture(engine, lambda: x * 2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.fill_(3)
        graph.replay()
        total = y.sum()
    side.synchronize()
    assert total.item() == 6 * (1 << 20)


# Breaks


def test_segments_and_breaks_are_replayed_in_order(engine: CUDASegmentEngine) -> None:
    x = ones(1)
    double = eager_on_graph(lambda: x.mul_(2))

    def work() -> None:
        for _ in range(5):
            x.add_(1)
            double()

    graph, _ = capture(engine, work)
    x.zero_()
    graph.replay()
    assert x.item() == 62
    assert (len(graph.segments), len(graph.breaks)) == (6, 5)


def test_a_result_of_a_break_is_copied_to_its_captured_address(
    engine: CUDASegmentEngine,
) -> None:
    state = {"value": 1.0}
    fresh = eager_on_graph(lambda: torch.full((64,), state["value"], device="cuda"))
    graph, y = capture(engine, lambda: fresh() + 1)
    noise = [normal(64) for _ in range(100)]
    state["value"] = 7.0
    graph.replay()
    assert len(noise) == 100
    assert y.unique().tolist() == [8]


def test_a_break_may_read_on_the_host(engine: CUDASegmentEngine) -> None:
    x, seen = ones(1), []
    look = eager_on_graph(lambda y: seen.append(y.item()))
    graph, _ = capture(engine, lambda: look(x + 1))
    x.fill_(4)
    graph.replay()
    assert seen[-1] == 5


def test_a_graph_of_another_engine_is_replayed_in_a_break_at_capture_and_at_replay(
    engine: CUDASegmentEngine,
) -> None:
    x = torch.zeros(4, device="cuda")
    inner, _ = capture(CUDASegmentEngine(), lambda: x.add_(1))
    outer, y = capture(engine, lambda: (x.mul_(2), eager_on_graph(inner.replay)(), x * 10)[2])
    x.fill_(3)
    outer.replay()
    assert (x.tolist(), y.tolist()) == ([7] * 4, [70] * 4)


def test_a_graph_of_the_same_engine_is_not_replayed_in_a_break(engine: CUDASegmentEngine) -> None:
    inner, _ = capture(engine, lambda: ones(4) + 1)
    with (
        pytest.raises(NestedCaptureError, match="of the same engine"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)),
    ):
        eager_on_graph(inner.replay)()
    assert not torch.cuda.is_current_stream_capturing()


def test_a_replay_inside_of_a_segment_is_refused_and_everything_works_afterwards(
    engine: CUDASegmentEngine,
) -> None:
    inner, y = capture(CUDASegmentEngine(), lambda: ones(4) + 1)
    with (
        pytest.raises(NestedCaptureError, match="inside a segment"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)),
    ):
        inner.replay()
    inner.replay()
    assert y.tolist() == [2] * 4


def capture_inline(engine: CUDASegmentEngine, work: Work) -> tuple[BreakableCUDAGraph, Any]:
    """Warm up and capture ``work``, breaks included; return the graph and what ``work`` returned at capture."""
    warm_up(engine, work)
    graph = BreakableCUDAGraph(engine)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, inline_breaks=True):
        result = work()
    return graph, result


def test_inline_breaks_are_part_of_one_graph(engine: CUDASegmentEngine) -> None:
    x, runs = ones(4), []

    @eager_on_graph
    def triple(y: Tensor) -> Tensor:
        runs.append(1)
        return y * 3

    graph, z = capture_inline(engine, lambda: triple(x + 1) + 1)
    assert (len(graph.segments), len(graph.breaks)) == (1, 0)
    runs.clear()
    x.fill_(4)
    graph.replay()
    assert z.tolist() == [16] * 4
    assert runs == []


def test_a_host_read_in_an_inline_break_raises_and_everything_works_afterwards(
    engine: CUDASegmentEngine,
) -> None:
    x, read = ones(4), eager_on_graph(lambda y: y.sum().item())
    graph = BreakableCUDAGraph(engine)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError),
        BreakableCUDAGraphCapture(graph, inline_breaks=True),
    ):
        read(x)
    assert not graph.captured
    other, y = capture_inline(engine, lambda: x + 1)
    other.replay()
    assert y.tolist() == [2] * 4


def test_empty_segments_are_kept_without_a_warning(engine: CUDASegmentEngine) -> None:
    x = ones(1)
    graph, _ = capture(engine, lambda: (break_graph(), break_graph(), x.add_(1), break_graph()))
    x.zero_()
    graph.replay()
    assert x.item() == 1
    assert len(graph.segments) == 4


def churn() -> None:
    """Allocate, fill and free tensors of many sizes, so that memory that nobody holds is overwritten."""
    gc.collect()
    sizes = (64, 128, 512, 1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 16)
    noise = [torch.full((size,), -1.0, device="cuda") for size in sizes for _ in range(50)]
    del noise


@pytest.mark.parametrize("kind", ["segment", "break", "static", "warm-up"])
def test_an_argument_survives_a_later_capture_in_the_pool(
    engine: CUDASegmentEngine, kind: str
) -> None:
    # What segments read is the caller's to keep; what crosses a break is the graph's.
    x = torch.arange(float(1 << 16), device="cuda")
    large, result = capture_doubling(engine, x, kind)
    small, _ = capture_doubling(engine, x[: 1 << 15], kind)
    for _ in range(3):
        churn()
        small.replay()
        churn()
        large.replay()
        assert torch.equal(result, (x + 1) * 2 + 0.5)


def capture_doubling(
    engine: CUDASegmentEngine, x: Tensor, kind: str
) -> tuple[BreakableCUDAGraph, Tensor]:
    static = [x + 1]
    warm: list[Tensor] = []

    def made_once() -> Tensor:
        if warm:
            return warm.pop()
        warm.append(x + 1)
        return warm[0]

    sources: dict[str, Callable[[], Tensor]] = {
        "segment": lambda: x + 1,
        "break": eager_on_graph(lambda: x + 1),
        "static": lambda: static[0],
        "warm-up": made_once,
    }

    @eager_on_graph
    def double(argument: Tensor) -> Tensor:
        noise = torch.full(x.shape, -1.0, device="cuda")
        del noise
        return argument * 2

    graph, result = capture(engine, lambda: double(sources[kind]()) + 0.5)
    static.clear()
    return graph, result


def test_work_that_a_break_queues_on_another_stream_is_in_no_segment(
    engine: CUDASegmentEngine,
) -> None:
    x, y, side = ones(1), ones(4), torch.cuda.Stream()

    @eager_on_graph
    def elsewhere() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about 10 ms: into the capture of the next segment
            x.add_(1)

    graph = BreakableCUDAGraph(engine)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        y.add_(1)
        elsewhere()
        y.add_(1)
    torch.cuda.synchronize()
    assert (x.item(), y.tolist()) == (2, [1] * 4)
    graph.replay()
    torch.cuda.synchronize()
    assert (x.item(), y.tolist()) == (3, [3] * 4)


# Memory


def chain(x: Tensor, breaks: int) -> None:
    """Work with 8 intermediate tensors, with ``breaks`` breaks in between; nothing crosses them but x."""
    for step in range(8):
        x.add_((x * 2).sum())
        if step < breaks:
            break_graph()


def bytes_of(*captures: tuple[int, int]) -> int:
    """Return what an engine holds after captures of (rows, breaks)."""
    engine = CUDASegmentEngine()
    graphs = [
        capture(engine, lambda rows=rows, breaks=breaks: chain(ones(rows, 1 << 18), breaks))[0]
        for rows, breaks in captures
    ]
    assert len(graphs) == len(captures)
    return engine.memory_bytes()


WITHOUT_WORKSPACES = """
import torch
from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, CUDASegmentEngine

engine = CUDASegmentEngine()
x, w = (torch.randn(shape, device="cuda").bfloat16() for shape in ((16, 8192), (8192, 256)))
with torch.no_grad():
    with engine.warming_up():
        x @ w
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        y = x @ w
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(y.float(), x.float() @ w.float(), rtol=0.05, atol=1.0)
"""


def test_workspaces_that_somebody_clears_are_not_those_of_segments() -> None:
    # torch's CUDA graph trees clear them at every recording. In a process of its own: the fault ends it.
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WORKSPACES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_memory_is_counted(engine: CUDASegmentEngine) -> None:
    graph, _ = capture(engine, lambda: ones(1 << 20) + 1)
    assert graph.captured
    assert engine.memory_bytes() >= 4 * MIB


def test_breaks_cost_no_memory() -> None:
    without = bytes_of((32, 0))
    assert without >= 32 * MIB
    assert bytes_of((32, 8)) == without


def test_buckets_cost_the_memory_of_the_largest() -> None:
    largest = bytes_of((32, 8))
    assert bytes_of((32, 8), (16, 8), (8, 8), (4, 8)) == largest


def test_memory_of_dropped_graphs_is_used_again(engine: CUDASegmentEngine) -> None:
    graph, _ = capture(engine, lambda: ones(1 << 22) + 1)
    before = engine.memory_bytes()
    graph.reset()
    del graph, _
    graph, _ = capture(engine, lambda: ones(1 << 22) + 1)
    assert graph.captured
    assert engine.memory_bytes() == before


# Failures

HOST_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "nonzero": lambda x: x.nonzero(),
    "index_by_mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: str(x),
    "error_check_of_an_inverse": lambda x: torch.linalg.inv(x[:64] + torch.eye(64, device="cuda")),
    "setitem_mask_and_tensor": lambda x: x.__setitem__(x > 0, torch.zeros(1, device="cuda")),
    "index_put_accumulating_by_mask": lambda x: x.index_put_(
        (x > 0,), torch.zeros((), device="cuda"), accumulate=True
    ),
    "tensor_from_the_host": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    "index_by_a_list": lambda x: x[[0, 1]],
}


def fail_to_capture(
    engine: CUDASegmentEngine, work: Callable[[Tensor], Any], kind: type[Exception]
) -> pytest.ExceptionInfo[Exception]:
    x = normal(128, 64)
    warm_up(engine, lambda: work(x.clone()))
    graph = BreakableCUDAGraph(engine)
    with torch.no_grad(), pytest.raises(kind) as caught, BreakableCUDAGraphCapture(graph):
        work(x)
    assert not graph.captured
    return caught


def works(engine: CUDASegmentEngine) -> None:
    """Check stream, allocator, random generator, and that the next capture replays right."""
    assert not torch.cuda.is_current_stream_capturing()
    big = torch.randn(1 << 22, device="cuda")
    assert big.isfinite().all()
    del big
    torch.cuda.empty_cache()
    x = normal(64, 64)
    graph, (y, drawn) = capture(engine, lambda: (x @ x, torch.rand(64, device="cuda")))
    x.copy_(normal(64, 64))
    graph.replay()
    assert torch.equal(y, x @ x)
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(drawn, first)


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_a_host_read_in_a_segment_raises_and_everything_works_afterwards(
    engine: CUDASegmentEngine, read: Callable[[Tensor], Any]
) -> None:
    fail_to_capture(engine, read, RuntimeError)
    works(engine)


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_a_host_read_after_a_break_raises_and_everything_works_afterwards(
    engine: CUDASegmentEngine, read: Callable[[Tensor], Any]
) -> None:
    fail_to_capture(engine, lambda x: (x * 2, break_graph(), read(x)), RuntimeError)
    works(engine)


def test_a_host_read_that_is_swallowed_makes_the_capture_fail(engine: CUDASegmentEngine) -> None:
    x = ones(4)

    def work() -> None:
        try:
            x.sum().item()
        except RuntimeError:
            return

    graph = BreakableCUDAGraph(engine)
    with pytest.raises(RuntimeError), BreakableCUDAGraphCapture(graph):
        work()
    assert not graph.captured
    works(engine)


def test_graphs_captured_before_a_failure_replay_after_it(engine: CUDASegmentEngine) -> None:
    x = normal(64, 64)
    graph, y = capture(engine, lambda: (x @ x).relu())
    fail_to_capture(engine, lambda x: x.sum().item(), RuntimeError)
    works(engine)
    x.copy_(normal(64, 64))
    graph.replay()
    assert torch.equal(y, (x @ x).relu())


def test_a_failure_keeps_no_more_than_the_memory_of_its_segment(
    engine: CUDASegmentEngine,
) -> None:
    def work(x: Tensor) -> None:
        (ones(1 << 22) * 2).sum().item()

    fail_to_capture(engine, work, RuntimeError)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    fail_to_capture(engine, work, RuntimeError)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 48 * MIB


@pytest.mark.parametrize("place", ["segment", "break", "later_segment"])
def test_an_exception_arrives_as_raised_and_everything_works_afterwards(
    engine: CUDASegmentEngine, place: str
) -> None:
    error = MistakeError("as it is")

    def fail() -> None:
        raise error

    def work() -> None:
        if place == "later_segment":
            break_graph()
        if place == "break":
            eager_on_graph(fail)()
        fail()

    graph = BreakableCUDAGraph(engine)
    with pytest.raises(MistakeError) as caught, BreakableCUDAGraphCapture(graph):
        work()
    assert caught.value is error
    assert not graph.captured
    works(engine)


def test_an_exception_in_a_break_at_replay_leaves_the_graph_usable(
    engine: CUDASegmentEngine,
) -> None:
    x, state = ones(1), {"fails": False}

    @eager_on_graph
    def maybe_fail() -> None:
        if state["fails"]:
            raise MistakeError

    graph, _ = capture(engine, lambda: (x.fill_(1), maybe_fail(), x.add_(10)))
    state["fails"] = True
    with pytest.raises(MistakeError):
        graph.replay()
    state["fails"] = False
    graph.replay()
    assert x.item() == 11


def test_collection_of_garbage_is_restored(engine: CUDASegmentEngine) -> None:
    assert gc.isenabled()
    with engine.capturing():
        assert not gc.isenabled()
    assert gc.isenabled()


# Runner


@pytest.fixture
def runner(toy_model: Callable[..., Any]) -> PrefillRunner:
    """Return a captured runner of the toy model with the SDPA backend."""
    model = toy_model(device="cuda")
    cache = PagedKVCache(model.spec, num_pages=32, page_size=4)
    runner = PrefillRunner(model, cache, "sdpa", buckets=TokenBuckets([8, 16]), max_requests=8)
    runner.capture()
    return runner


def batch_of(runner: PrefillRunner, *lengths: int) -> PrefillBatch:
    chunks = [Chunk(token_ids=[7] * n, sequence=KVSequence()) for n in lengths]
    return PrefillBatch.from_chunks(chunks, runner.kv_cache)


@pytest.mark.parametrize("lengths", [(8,), (3, 4), (7,), (1,), (9,), (1,) * 8], ids=str)
def test_a_replay_of_a_model_has_the_bits_of_padded_eager(
    runner: PrefillRunner, lengths: tuple[int, ...]
) -> None:
    batch = batch_of(runner, *lengths)
    replayed = runner.prefill(batch).hidden_RD.clone()
    assert torch.equal(replayed, runner.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD)
    assert sum(runner.stats.replays.values()) == 1


@pytest.mark.parametrize("lengths", [(9,), (3, 4), (16,)], ids=str)
def test_addresses_recorded_at_capture_are_held_by_the_runner(
    runner: PrefillRunner, lengths: tuple[int, ...]
) -> None:
    batch = batch_of(runner, *lengths)
    expected = runner.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD.clone()
    for _ in range(3):
        churn()
        runner.prefill(batch_of(runner, 5))
        churn()
        assert torch.equal(runner.prefill(batch).hidden_RD, expected)


def test_a_model_that_reads_on_the_host_is_refused_and_the_runner_captures_later(
    toy_model: type[Any],
) -> None:
    class Reading(toy_model):
        reads = True

        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            hidden_TD = super().forward(input_ids_T, positions_T, ctx)
            return hidden_TD / hidden_TD.amax().item() if self.reads else hidden_TD

    model = Reading(device="cuda")
    cache = PagedKVCache(model.spec, num_pages=32, page_size=4)
    runner = PrefillRunner(model, cache, "sdpa", buckets=TokenBuckets([8]), max_requests=8)
    with pytest.raises(RuntimeError):
        runner.capture()
    model.reads = False
    runner.capture()
    batch = batch_of(runner, 3)
    replayed = runner.prefill(batch).hidden_RD.clone()
    assert torch.equal(replayed, runner.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD)


def test_a_prefill_does_not_wait_for_the_device(runner: PrefillRunner) -> None:
    runner.prefill(batch_of(runner, 3, 4))
    batch = batch_of(runner, 5, 2)
    with synchronisation("error"):
        runner.prefill(batch)
