"""Engines beside each other: in threads, inside of captures, over streams, and hundreds of them in one process."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CUDASegmentEngine,
    NestedCaptureError,
    break_graph,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def x() -> Tensor:
    return torch.ones(64, 64, device="cuda")


def capture(engine: CUDASegmentEngine, work: Callable[[], Any]) -> tuple[BreakableCUDAGraph, Any]:
    graph = BreakableCUDAGraph(engine)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        result = work()
    return graph, result


def works(engine: CUDASegmentEngine, x: Tensor) -> bool:
    """Capture a product and replay it; tell whether it is right."""
    graph, y = capture(engine, lambda: x @ x)
    graph.replay()
    return torch.equal(y, x @ x)


def refused(engine: CUDASegmentEngine, work: Callable[[], Any], kind: type[Exception]) -> str:
    """Capture ``work``, which must fail; return the error with its notes."""
    with pytest.raises(kind) as caught:
        capture(engine, work)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


# Streams


def test_a_side_stream_that_is_open_at_the_end_of_a_segment_is_named(x: Tensor) -> None:
    engine, side = CUDASegmentEngine(), torch.cuda.Stream()

    def work() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul(2)

    message = refused(engine, work, RuntimeError)
    assert repr(side) in message
    assert "wait_stream(that stream)" in message
    assert works(engine, x)


def test_a_side_stream_that_is_open_at_a_break_is_named(x: Tensor) -> None:
    engine, side = CUDASegmentEngine(), torch.cuda.Stream()

    def work() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul(2)
        break_graph()

    assert repr(side) in refused(engine, work, RuntimeError)
    assert works(engine, x)


def test_a_wait_for_a_stream_outside_of_the_capture_is_named(x: Tensor) -> None:
    engine, outside = CUDASegmentEngine(), torch.cuda.Stream()
    with torch.cuda.stream(outside):
        x.mul(2)
    message = refused(
        engine, lambda: torch.cuda.current_stream().wait_stream(outside), RuntimeError
    )
    assert f"waits for {outside!r}" in message
    assert works(engine, x)


def test_a_side_stream_that_is_joined_is_part_of_the_segment(x: Tensor) -> None:
    side = torch.cuda.Stream()

    def work() -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 2
        main.wait_stream(side)
        return y + 1

    graph, y = capture(CUDASegmentEngine(), work)
    graph.replay()
    assert y.unique().tolist() == [3]


def test_a_capture_runs_on_the_stream_it_is_given(x: Tensor) -> None:
    stream = torch.cuda.Stream()
    engine = CUDASegmentEngine(stream=stream)
    _, seen = capture(engine, lambda: torch.cuda.current_stream())
    assert seen == stream
    assert works(engine, x)


# Captures in captures


def test_an_engine_made_in_a_segment_is_refused_by_name(x: Tensor) -> None:
    engine = CUDASegmentEngine()
    message = refused(engine, lambda: (x.mul(2), CUDASegmentEngine()), NestedCaptureError)
    assert "an engine cannot be made inside a capture" in message
    assert works(engine, x)


def in_a_capture_of_torch(x: Tensor, work: Callable[[], Any]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.mul(2)
        work()


def test_an_engine_made_in_a_capture_of_torch_is_refused_by_name(x: Tensor) -> None:
    with pytest.raises(NestedCaptureError, match="an engine cannot be made"):
        in_a_capture_of_torch(x, CUDASegmentEngine)


def test_a_capture_inside_one_of_torch_is_refused_by_name(x: Tensor) -> None:
    engine = CUDASegmentEngine()
    with pytest.raises(NestedCaptureError, match="a capture cannot be started"):
        in_a_capture_of_torch(x, lambda: capture(engine, lambda: x.mul(3)))
    assert works(engine, x)


# Threads


def in_threads(work: Callable[[], Any], count: int) -> list[Any]:
    """Run ``work`` in ``count`` threads at once; return what each returned or raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  # to be looked at by the test
            results.append(error)

    threads = [Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_make_engines_and_capture_one_after_the_other(x: Tensor) -> None:
    def make_and_capture() -> bool:
        engine = CUDASegmentEngine()
        return all(works(engine, x) for _ in range(5))

    assert in_threads(make_and_capture, 4) == [True] * 4


def test_threads_capture_with_one_engine_one_after_the_other(x: Tensor) -> None:
    engine = CUDASegmentEngine()
    assert in_threads(lambda: capture(engine, lambda: x @ x)[0].captured, 4) == [True] * 4


def test_captures_go_on_while_another_thread_allocates_and_waits(x: Tensor) -> None:
    stop, rounds = Event(), []

    def serve() -> None:
        while not stop.is_set():
            y = torch.ones(1 << 20, device="cuda") * 2
            torch.cuda.empty_cache()
            assert y.sum().item() == 2 << 20
            rounds.append(1)

    thread = Thread(target=serve)
    thread.start()
    try:
        engine = CUDASegmentEngine()
        done = [works(engine, x) for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    assert done == [True] * 20
    assert rounds


# What the caller shares


def test_an_engine_captures_into_the_pool_of_another_graph(x: Tensor) -> None:
    theirs, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(theirs, stream=stream):
        y = torch.ones(1 << 22, device="cuda") * 2
    del y
    engine = CUDASegmentEngine(pool=theirs.pool(), stream=stream)
    graph, _ = capture(engine, lambda: torch.ones(1 << 22, device="cuda") * 2)
    assert graph.captured
    assert engine.memory_bytes() == 0  # theirs had room for it


def test_a_generator_of_ones_own_draws_anew_at_each_replay() -> None:
    generator = torch.Generator(device="cuda")
    engine = CUDASegmentEngine(generators=[generator])
    graph, drawn = capture(engine, lambda: torch.rand(64, device="cuda", generator=generator))
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(drawn, first)


def test_a_generator_that_nobody_named_is_refused_with_the_way_out(x: Tensor) -> None:
    generator, engine = torch.Generator(device="cuda"), CUDASegmentEngine()
    message = refused(
        engine, lambda: torch.rand(64, device="cuda", generator=generator), RuntimeError
    )
    assert "CUDASegmentEngine(generators=[generator])" in message
    assert works(engine, x)


# Many of them


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def use_and_drop(x: Tensor, engines: int) -> int:
    for _ in range(engines):
        assert works(CUDASegmentEngine(), x)
    return reserved()


def test_engines_that_are_dropped_leave_nothing(x: Tensor) -> None:
    first = use_and_drop(x, 2)
    assert use_and_drop(x, 100) == first


def test_workspaces_of_a_dropped_engine_are_not_those_of_another(x: Tensor) -> None:
    # cuBLAS has one workspace for the stream that both capture on; the one that is dropped asked for it first.
    assert works(CUDASegmentEngine(), x)
    engine = CUDASegmentEngine()
    w = torch.randn(8192, 256, device="cuda").bfloat16()
    rows = torch.randn(16, 8192, device="cuda").bfloat16()
    graph, y = capture(engine, lambda: rows @ w)
    torch._C._cuda_clearCublasWorkspaces()
    reserved()
    graph.replay()
    assert torch.allclose(y.float(), rows.float() @ w.float(), rtol=0.05, atol=1.0)


def test_a_process_full_of_engines_captures_and_aborts_stays_flat() -> None:
    # In a process of its own: the fault that this is about ends it.
    steps = os.environ.get("BCG_ENGINE_STEPS", "300")
    script = Path(__file__).with_name("engine_stress.py")
    done = subprocess.run(
        [sys.executable, str(script), steps], capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
