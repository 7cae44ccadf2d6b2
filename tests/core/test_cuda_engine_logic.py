"""What the CUDA engine asks of torch, and in which order, on a stand-in for ``torch.cuda``.

Whether torch then does the right thing is for ``test_cuda_engine.py``, on a GPU.
"""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from threading import Thread
from typing import Any

import pytest
import torch

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CUDASegmentEngine,
    NestedCaptureError,
    break_graph,
    cuda_process,
    eager_on_graph,
    engine_for,
)


class MistakeError(Exception):
    """What user code raises here."""


class Stream:
    def __init__(self, cuda: "FakeCuda", name: str, device: torch.device | None = None) -> None:
        self.cuda = cuda
        self.name = name
        self.device = device

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"synchronize {self.name}")


class Graph:
    """A graph whose capture fails at its end if ``cuda.illegal`` is set meanwhile."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda = cuda
        self.number = len(cuda.graphs)
        self.pool: Any = None
        self.mode = ""
        self.generators: list[Any] = []
        self.open = False
        cuda.graphs.append(self)

    def register_generator_state(self, generator: Any) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.pool = pool
        self.mode = capture_error_mode
        self.open = True
        self.cuda.work = 0
        self.cuda.log.append(f"begin {self.number} on {self.cuda.current.name}")

    def capture_end(self) -> None:
        if not self.open:
            raise RuntimeError("not capturing")
        if self.cuda.illegal:
            self.cuda.illegal_ends += 1
            raise RuntimeError("operation failed due to a previous error during capture")
        self.open = False
        self.cuda.log.append(f"end {self.number}")
        if not self.cuda.work:
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=2)

    def replay(self) -> None:
        self.cuda.log.append(f"replay {self.number}")


class FakeCuda:
    """What the engine uses of ``torch.cuda``; ``log`` tells what happened in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.graphs: list[Graph] = []
        self.work = 0
        self.illegal = False
        self.illegal_ends = 0
        self.current = Stream(self, "caller")
        self.device = 3
        self.names = cycle(["capture", "warm-up"])
        self.ended: list[tuple[Any, Any]] = []
        self.released: list[tuple[Any, Any]] = []
        self.snapshots: dict[Any, list[dict[str, int]]] = {}
        self.pools = 0
        self.reserved = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fakes = {
            "is_available": lambda: True,
            "current_device": lambda: self.device,
            "device": self.on_device,
            "Stream": lambda device: Stream(self, next(self.names), device),
            "is_current_stream_capturing": lambda: any(graph.open for graph in self.graphs),
            "current_stream": lambda device: self.current,
            "stream": self.stream,
            "current_blas_handle": lambda: 1,
            "synchronize": lambda device: self.log.append(f"synchronize {device}"),
            "graph_pool_handle": self.new_pool,
            "CUDAGraph": lambda: Graph(self),
            "memory_snapshot": lambda pool: self.snapshots.get(pool, []),
            "memory_reserved": lambda device: self.reserved,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_pool, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release_pool, raising=False)
        monkeypatch.setattr(cuda_process, "_multiply", lambda device: self.launch())
        monkeypatch.setattr(cuda_process, "_broken", [])

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before

    def new_pool(self) -> str:
        self.pools += 1
        return f"pool {self.pools}"

    def end_pool(self, device: int, pool: str) -> None:
        self.ended.append((device, pool))

    def release_pool(self, device: int, pool: str) -> None:
        self.released.append((device, pool))

    def launch(self) -> None:
        """Stand for device work."""
        self.work += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    fake.install(monkeypatch)
    cuda_process.shared_streams.cache_clear()
    yield fake
    cuda_process.shared_streams.cache_clear()


@pytest.fixture
def engine(cuda: FakeCuda) -> CUDASegmentEngine:
    engine = CUDASegmentEngine()
    cuda.log.clear()
    return engine


def capture(cuda: FakeCuda, engine: CUDASegmentEngine, breaks: int = 1) -> BreakableCUDAGraph:
    """Capture one launch in each of ``breaks + 1`` segments."""
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        for _ in range(breaks):
            cuda.launch()
            break_graph()
        cuda.launch()
    return graph


def segment_pools(cuda: FakeCuda, graph: BreakableCUDAGraph) -> set[str]:
    return {segment.pool for segment in graph.segments}


# Devices


def test_without_an_index_the_current_device_is_meant(engine: CUDASegmentEngine) -> None:
    assert engine.device == torch.device("cuda", 3)


def test_an_index_is_kept(cuda: FakeCuda) -> None:
    assert CUDASegmentEngine("cuda:1").device == torch.device("cuda", 1)


def test_cuda_has_the_engine_of_real_graphs(cuda: FakeCuda) -> None:
    assert isinstance(engine_for("cuda"), CUDASegmentEngine)


@pytest.fixture
def elsewhere(cuda: FakeCuda, engine: CUDASegmentEngine) -> tuple[BreakableCUDAGraph, list[int]]:
    """Capture a break on device 3, then make device 0 current; returns the graph and what the break sees as current."""
    seen: list[int] = []
    note = eager_on_graph(lambda: seen.append(cuda.device))
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        note()
    cuda.device = 0
    return graph, seen


def test_a_break_at_replay_sees_the_device_of_the_capture(
    elsewhere: tuple[BreakableCUDAGraph, list[int]],
) -> None:
    graph, seen = elsewhere
    graph.replay()
    assert seen == [3, 3]


def test_after_a_replay_the_callers_device_is_current(
    cuda: FakeCuda, elsewhere: tuple[BreakableCUDAGraph, list[int]]
) -> None:
    elsewhere[0].replay()
    assert cuda.device == 0


# Captures


def test_segments_are_captured_on_the_capture_stream_after_a_synchronisation(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    first = len(cuda.graphs)
    capture(cuda, engine)
    assert cuda.log == [
        "synchronize cuda:3",
        f"begin {first} on capture",
        f"end {first}",
        f"begin {first + 1} on capture",
        f"end {first + 1}",
        f"begin {first + 2} on capture",
        f"end {first + 2}",
        "caller waits for capture",
    ]


def test_a_workspace_is_provided_first_in_a_pool_of_no_engine(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    first = len(cuda.graphs)
    graph = capture(cuda, engine)
    assert cuda.graphs[first].pool not in segment_pools(cuda, graph)


def test_the_workspaces_of_all_engines_lie_in_one_pool(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    pools = []
    for one in (engine, CUDASegmentEngine()):
        first = len(cuda.graphs)
        capture(cuda, one)
        pools.append(cuda.graphs[first].pool)
    assert pools[0] == pools[1]


def test_engines_of_a_device_capture_on_one_stream(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    streams: set[Stream] = set()
    note = eager_on_graph(lambda: streams.add(cuda.current))
    for one in (engine, CUDASegmentEngine()):
        with BreakableCUDAGraphCapture(BreakableCUDAGraph(one)):
            note()
    assert len(streams) == 1


# What a caller may choose


def test_other_threads_may_go_on_unless_asked_otherwise(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    (segment, _) = capture(cuda, engine).segments
    assert segment.mode == "thread_local"


def test_the_error_mode_can_be_chosen(cuda: FakeCuda) -> None:
    (segment, _) = capture(cuda, CUDASegmentEngine(capture_error_mode="global")).segments
    assert segment.mode == "global"


def test_a_pool_can_be_shared(cuda: FakeCuda) -> None:
    graph = capture(cuda, CUDASegmentEngine(pool="theirs"))  # type: ignore[arg-type]
    assert segment_pools(cuda, graph) == {"theirs"}


def test_a_stream_can_be_chosen(cuda: FakeCuda) -> None:
    stream: Any = Stream(cuda, "mine", torch.device("cuda", 3))
    engine = CUDASegmentEngine(stream=stream)
    cuda.log.clear()
    capture(cuda, engine)
    assert {line.split(" on ")[1] for line in cuda.log if " on " in line} == {"mine"}


def test_a_stream_of_another_device_is_refused(cuda: FakeCuda) -> None:
    stream: Any = Stream(cuda, "mine", torch.device("cuda", 1))
    with pytest.raises(ValueError, match="the stream is one of cuda:1, the engine of cuda:3"):
        CUDASegmentEngine(stream=stream)


def test_generators_are_known_to_every_segment(cuda: FakeCuda) -> None:
    generators: Any = ["one", "two"]
    graph = capture(cuda, CUDASegmentEngine(generators=generators))
    assert [segment.generators for segment in graph.segments] == [["one", "two"]] * 2


# Captures in captures, and in other threads


def test_an_engine_is_not_made_while_somebody_captures(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    cuda.graphs[-1].open = True
    with pytest.raises(NestedCaptureError, match="an engine cannot be made inside a capture"):
        CUDASegmentEngine()


def test_a_capture_is_not_started_inside_that_of_somebody_else(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    cuda.graphs[-1].open = True
    with pytest.raises(NestedCaptureError, match="a capture cannot be started inside a capture"):
        capture(cuda, engine)


def test_a_capture_waits_for_that_of_another_thread(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    other = CUDASegmentEngine()
    cuda.log.clear()
    thread = Thread(target=capture, args=(cuda, other))
    with engine.capturing():
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive()
        during = list(cuda.log)
    thread.join()
    assert during.count("synchronize cuda:3") == 1
    assert cuda.log.count("synchronize cuda:3") == 2


def test_a_break_at_capture_runs_on_the_capture_stream(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    streams: list[str] = []
    note = eager_on_graph(lambda: streams.append(cuda.current.name))
    with BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
        note()
    assert streams == ["capture"]


def test_after_a_capture_the_callers_stream_is_current(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    capture(cuda, engine)
    assert cuda.current.name == "caller"


def test_all_segments_of_all_graphs_share_one_pool(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    graphs = [capture(cuda, engine, breaks=3), capture(cuda, engine, breaks=2)]
    pools = [segment_pools(cuda, graph) for graph in graphs]
    assert pools[0] == pools[1]
    assert len(pools[0]) == 1


def test_two_engines_have_two_pools(cuda: FakeCuda, engine: CUDASegmentEngine) -> None:
    other = CUDASegmentEngine()
    one, two = capture(cuda, engine), capture(cuda, other)
    assert not segment_pools(cuda, one) & segment_pools(cuda, two)


def test_a_replay_replays_graphs_and_breaks_in_order(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    note = eager_on_graph(lambda: cuda.log.append("break"))
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        cuda.launch()
        note()
        cuda.launch()
    first, second = graph.segments
    cuda.log.clear()
    graph.replay()
    assert cuda.log == [f"replay {first.number}", "break", f"replay {second.number}"]


def test_with_breaks_inline_one_graph_is_captured(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    first, launch = len(cuda.graphs), eager_on_graph(cuda.launch)
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph, inline_breaks=True):
        launch()
        break_graph()
        launch()
    assert cuda.log[3:-1] == [f"begin {first + 1} on capture", f"end {first + 1}"]
    cuda.log.clear()
    graph.replay()
    assert cuda.log == [f"replay {first + 1}"]


def test_an_empty_segment_is_no_warning_and_replays_nothing(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        break_graph()
        break_graph()
    assert len(graph.segments) == 3
    cuda.log.clear()
    graph.replay()
    assert cuda.log == []


def test_another_warning_at_the_end_of_a_segment_is_not_taken_for_an_empty_one(
    cuda: FakeCuda, engine: CUDASegmentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(graph: Graph) -> None:
        graph.open = False
        warnings.warn("something else", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr(Graph, "capture_end", warn)
    graph = BreakableCUDAGraph(engine)
    with pytest.warns(RuntimeWarning, match="something else"), BreakableCUDAGraphCapture(graph):
        cuda.launch()
    assert isinstance(graph.segments[0], Graph)


# Warm-up


def test_a_warm_up_runs_on_a_stream_of_its_own_between_waits(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    with engine.warming_up():
        cuda.log.append(f"warm up on {cuda.current.name}")
    assert cuda.log == [
        "warm-up waits for caller",
        "warm up on warm-up",
        "caller waits for warm-up",
        "synchronize warm-up",
    ]


def test_after_a_failed_warm_up_the_caller_still_waits(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    with pytest.raises(MistakeError), engine.warming_up():
        raise MistakeError
    assert cuda.log == ["warm-up waits for caller", "caller waits for warm-up"]
    assert cuda.current.name == "caller"


# Garbage collection


@pytest.fixture
def collecting() -> Iterator[None]:
    """Restore garbage collection, whatever a test does to it."""
    before = gc.isenabled()
    yield
    if before:
        gc.enable()
    else:
        gc.disable()


@pytest.mark.usefixtures("collecting")
def test_garbage_is_not_collected_during_a_capture(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    gc.enable()
    with engine.capturing():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_collection_that_was_off_stays_off(cuda: FakeCuda, engine: CUDASegmentEngine) -> None:
    gc.disable()
    capture(cuda, engine)
    assert not gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_collection_is_on_again_after_a_failed_capture(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    gc.enable()
    with pytest.raises(MistakeError), BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
        raise MistakeError
    assert gc.isenabled()


# Failures


def test_an_exception_in_a_segment_ends_its_graph_and_keeps_the_pool(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    before = segment_pools(cuda, capture(cuda, engine))
    with pytest.raises(MistakeError), BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
        raise MistakeError
    assert [graph.number for graph in cuda.graphs if graph.open] == []
    assert cuda.current.name == "caller"
    assert segment_pools(cuda, capture(cuda, engine)) == before


def test_an_exception_in_a_break_leaves_nothing_capturing(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    def fail() -> None:
        raise MistakeError

    fails = eager_on_graph(fail)
    with pytest.raises(MistakeError), BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
        fails()
    assert [graph.number for graph in cuda.graphs if graph.open] == []


def illegal_capture(cuda: FakeCuda, engine: CUDASegmentEngine) -> None:
    """Fail a capture as an illegal call in it does: the call raises, and so does the graph's end."""
    with BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
        cuda.illegal = True
        raise MistakeError("operation not permitted when stream is capturing")


@pytest.fixture
def after_illegal_capture(
    cuda: FakeCuda, engine: CUDASegmentEngine, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Fail a capture by an illegal call; return the pool that it used."""
    (pool,) = segment_pools(cuda, capture(cuda, engine))
    end = Graph.capture_end

    def end_once(graph: Graph) -> None:
        try:
            end(graph)
        finally:
            cuda.illegal = graph.open = False

    monkeypatch.setattr(Graph, "capture_end", end_once)
    with pytest.raises(MistakeError, match="not permitted"):
        illegal_capture(cuda, engine)
    assert cuda.illegal_ends == 1
    return pool


def test_an_illegal_call_reaches_the_caller_and_retires_the_pool(
    cuda: FakeCuda, engine: CUDASegmentEngine, after_illegal_capture: str
) -> None:
    assert after_illegal_capture not in segment_pools(cuda, capture(cuda, engine))


def test_after_an_illegal_call_the_allocator_is_told_to_leave_the_pool(
    cuda: FakeCuda, engine: CUDASegmentEngine, after_illegal_capture: str
) -> None:
    assert cuda.ended == cuda.released == [(3, after_illegal_capture)]


def test_a_graph_that_could_not_be_ended_is_kept_and_counted(
    cuda: FakeCuda, after_illegal_capture: str
) -> None:
    assert cuda_process.broken_captures() == 1


def test_after_an_illegal_call_an_allocator_that_left_already_is_no_error(
    cuda: FakeCuda, engine: CUDASegmentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: int, pool: str) -> None:
        raise RuntimeError("not recording to this pool")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    engine.begin()
    cuda.graphs[-1].open = False
    engine.abort()
    assert capture(cuda, engine).captured


def test_after_an_illegal_call_later_captures_share_the_new_pool(
    cuda: FakeCuda, engine: CUDASegmentEngine, after_illegal_capture: str
) -> None:
    one, two = capture(cuda, engine), capture(cuda, engine)
    assert segment_pools(cuda, one) == segment_pools(cuda, two)


def test_the_error_of_a_segments_end_reaches_the_caller(
    cuda: FakeCuda, engine: CUDASegmentEngine
) -> None:
    graph = BreakableCUDAGraph(engine)
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        BreakableCUDAGraphCapture(graph),
    ):
        fail_the_next_end_alone(cuda)
    assert not graph.captured
    assert cuda.current.name == "caller"


def fail_the_next_end_alone(cuda: FakeCuda) -> None:
    """Make the open graph fail at its end, and no other."""
    graph = cuda.graphs[-1]

    def fail() -> None:
        graph.open = False
        raise RuntimeError("operation failed due to a previous error during capture")

    graph.capture_end = fail  # type: ignore[method-assign]


def test_a_capture_that_does_not_begin_reaches_the_caller(
    cuda: FakeCuda, engine: CUDASegmentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Graph.capture_begin

    def refuse_once(graph: Graph, pool: Any, capture_error_mode: str) -> None:
        if pool != "pool 2":  # that of the engine
            return begin(graph, pool, capture_error_mode)
        monkeypatch.setattr(Graph, "capture_begin", begin)
        raise RuntimeError("capture_begin refused")

    monkeypatch.setattr(Graph, "capture_begin", refuse_once)
    graph = BreakableCUDAGraph(engine)
    with pytest.raises(RuntimeError, match="capture_begin refused"):
        BreakableCUDAGraphCapture(graph).__enter__()
    assert cuda.current.name == "caller"
    assert capture(cuda, engine).captured


def test_abort_without_a_segment_does_nothing(cuda: FakeCuda, engine: CUDASegmentEngine) -> None:
    engine.abort()
    assert cuda.log == []


# Memory


def reserving(cuda: FakeCuda, engine: CUDASegmentEngine, grown: int) -> None:
    """Capture something that takes ``grown`` bytes."""
    with BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
        cuda.launch()
        cuda.reserved += grown


def test_memory_is_what_captures_have_reserved(cuda: FakeCuda, engine: CUDASegmentEngine) -> None:
    reserving(cuda, engine, 20 << 20)
    cuda.reserved += 1 << 30  # somebody else's
    reserving(cuda, engine, 2 << 20)
    assert engine.memory_bytes() == 22 << 20


def test_memory_of_a_failed_capture_is_counted(cuda: FakeCuda, engine: CUDASegmentEngine) -> None:
    def fail() -> None:
        with BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
            cuda.reserved += 5
            raise MistakeError

    with pytest.raises(MistakeError):
        fail()
    assert engine.memory_bytes() == 5


def test_no_snapshot_is_taken_to_count_memory(
    cuda: FakeCuda, engine: CUDASegmentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With one for each capture, a process with hundreds of pools died of damaged memory (torch 2.11).
    monkeypatch.delattr(torch.cuda, "memory_snapshot")
    reserving(cuda, engine, 1)
    assert engine.memory_bytes() == 1


def test_addresses_in_the_pool_are_held(cuda: FakeCuda, engine: CUDASegmentEngine) -> None:
    (pool,) = segment_pools(cuda, capture(cuda, engine))
    cuda.snapshots = {pool: [{"address": 100, "total_size": 50}]}
    assert engine.holds([99, 100, 149, 150]) == {100, 149}
