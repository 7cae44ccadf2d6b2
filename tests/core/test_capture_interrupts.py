"""What must end with a capture: being inside it, in copied contexts and after interrupts of its clean-up too."""

import asyncio
import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CPUSegmentEngine,
    break_graph,
    eager_on_graph,
    is_capturing,
)
from bcg_core.breaks import active_recorder
from bcg_core.cpu_recorder import CPUSegment

Capture = Callable[..., Any]


def assert_outside(engine: CPUSegmentEngine) -> None:
    """Check that this thread is inside no capture: by name, in torch, and for the engine."""
    assert active_recorder.get() is None
    assert engine.busy is None
    assert (torch.ones(2) + 1).tolist() == [2, 2]
    graph, x = BreakableCUDAGraph(engine), torch.zeros(1)
    with BreakableCUDAGraphCapture(graph):
        x.add_(1)
        break_graph()
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2]


# Copied contexts


def test_a_context_that_was_copied_in_a_break_is_outside_after_the_capture(
    capture: Capture, engine: CPUSegmentEngine
) -> None:
    copies: list[contextvars.Context] = []
    capture(eager_on_graph(lambda: copies.append(contextvars.copy_context())))
    copies[0].run(assert_outside, engine)


def test_a_task_that_was_created_in_a_break_can_break_and_capture(engine: CPUSegmentEngine) -> None:
    runs: list[str] = []

    async def later() -> None:
        eager_on_graph(lambda: runs.append("break"))()
        assert_outside(engine)
        runs.append("capture")

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []
        create = eager_on_graph(lambda: tasks.append(asyncio.create_task(later())))
        graph = BreakableCUDAGraph(engine)
        with BreakableCUDAGraphCapture(graph):
            create()
        await tasks[0]

    asyncio.run(main())
    assert runs == ["break", "capture"]


def test_a_loop_callback_that_was_set_in_a_break_is_outside_after_the_capture(
    engine: CPUSegmentEngine,
) -> None:
    seen: list[bool] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        @eager_on_graph
        def set_callback() -> None:
            loop.call_soon(lambda: seen.append(is_capturing()))

        with BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
            set_callback()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == [False]


def test_a_worker_that_runs_in_a_copied_context_is_outside_of_the_capture(
    capture: Capture,
) -> None:
    recorders: list[Any] = []

    @eager_on_graph
    def hand_over() -> None:
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as pool:
            recorders.append(pool.submit(context.run, active_recorder.get).result())

    capture(hand_over)
    assert recorders == [None]


class InAContext:
    """Know the capture as a context variable does: by the context, which can be copied."""

    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("recorder", default=None)

    @property
    def recorder(self) -> Any:
        return self.variable.get()

    @recorder.setter
    def recorder(self, recorder: Any) -> None:
        self.variable.set(recorder)

    def get(self) -> Any:
        return self.variable.get()


def test_by_a_context_variable_a_copied_context_is_inside_for_ever(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = InAContext()
    for module in ("breaks", "graph", "engine"):
        monkeypatch.setattr(f"bcg_core.{module}.active_recorder", inside)
    copies: list[contextvars.Context] = []
    capture(eager_on_graph(lambda: copies.append(contextvars.copy_context())))
    assert copies[0].run(is_capturing)


# Interrupts in the clean-up


class InterruptedEngine(CPUSegmentEngine):
    """An engine that is interrupted once, in the step that a test names, before or after it."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self._step = step

    def _interrupt(self, step: str) -> None:
        if step == self._step:
            self._step = ""
            raise KeyboardInterrupt(step)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with super().capturing():
            try:
                yield
            finally:
                self._interrupt("before leaving")
        self._interrupt("after leaving")

    def begin(self) -> None:
        self._interrupt("before begin")
        super().begin()
        self._interrupt("after begin")

    def end(self) -> CPUSegment:
        self._interrupt("before end")
        segment = super().end()
        self._interrupt("after end")
        return segment

    def abort(self) -> None:
        self._interrupt("before abort")
        super().abort()
        self._interrupt("after abort")


STEPS = [
    f"{when} {what}"
    for what in ("begin", "end", "abort", "leaving")
    for when in ("before", "after")
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.replace(" ", "_"))
def test_an_interrupt_of_an_engine_leaves_the_capture(step: str) -> None:
    engine = InterruptedEngine(step)
    graph = BreakableCUDAGraph(engine)
    with pytest.raises(KeyboardInterrupt, match=step), BreakableCUDAGraphCapture(graph):
        torch.ones(1)
    assert not graph.captured
    assert_outside(engine)


@pytest.mark.parametrize("step", ["before abort", "after abort", "before leaving"])
def test_an_interrupt_while_another_error_is_cleaned_up_leaves_the_capture(step: str) -> None:
    engine = InterruptedEngine(step)
    with (
        pytest.raises(KeyboardInterrupt, match=step) as caught,
        BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)),
    ):
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    del caught
    assert_outside(engine)


class InterruptedCall:
    """Interrupt the n-th call of a function of ours or of contextlib while a capture ends, as a signal would.

    Torch's own functions are left alone: a mode that was interrupted while it is taken off is torch's.
    """

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Ended(BreakableCUDAGraphCapture):
    """A capture whose end is watched."""

    def __init__(self, graph: BreakableCUDAGraph, number: int) -> None:
        super().__init__(graph)
        self.interrupt = InterruptedCall(number)

    def __exit__(self, *details: Any) -> None:
        def trace(frame: FrameType, event: str, argument: object) -> None:
            file, own = frame.f_code.co_filename, BreakableCUDAGraphCapture.__exit__.__code__
            ours = Path(file).parent.name == "bcg_core" or file == contextlib.__file__
            if event == "call" and ours and frame.f_code is not own:
                self.interrupt(frame, event, argument)

        sys.settrace(trace)
        try:
            super().__exit__(*details)
        finally:
            sys.settrace(None)


def end_a_capture(engine: CPUSegmentEngine, number: int, error: type[Exception] | None) -> int:
    """Capture, interrupt call ``number`` of the end, and return how many calls it was short of."""
    capturing = Ended(BreakableCUDAGraph(engine), number)
    with suppress(KeyboardInterrupt, ZeroDivisionError), capturing:
        torch.ones(1) + 1
        if error is not None:
            raise error
    return capturing.interrupt.left


@pytest.mark.parametrize("error", [None, ZeroDivisionError], ids=["ended", "failed"])
def test_an_interrupt_of_any_call_of_the_clean_up_leaves_the_capture(
    error: type[Exception] | None,
) -> None:
    for number in range(1, 1000):
        engine = CPUSegmentEngine()
        left = end_a_capture(engine, number, error)
        assert_outside(engine)
        if left > 0:
            break
    assert 5 < number < 999


# Whether work is recorded


def test_is_capturing_in_each_place(engine: CPUSegmentEngine, graph: BreakableCUDAGraph) -> None:
    seen: dict[str, bool] = {"before": is_capturing()}
    look = eager_on_graph(lambda: seen.update(in_a_break=is_capturing()))

    def in_a_thread() -> None:
        thread = threading.Thread(target=lambda: seen.update(in_a_thread=is_capturing()))
        thread.start()
        thread.join()

    with BreakableCUDAGraphCapture(graph):
        seen["in_a_segment"] = is_capturing()
        in_a_thread()
        look()
        seen["after_a_break"] = is_capturing()
    seen["after"] = is_capturing()
    assert seen == {
        "before": False,
        "in_a_segment": True,
        "in_a_thread": False,
        "in_a_break": False,
        "after_a_break": True,
        "after": False,
    }


def test_is_capturing_at_replay(capture: Capture) -> None:
    seen: list[bool] = []
    graph, _ = capture(eager_on_graph(lambda: seen.append(is_capturing())))
    graph.replay()
    assert seen == [False, False]


def test_is_capturing_in_a_break_that_is_part_of_the_segment(graph: BreakableCUDAGraph) -> None:
    seen: list[bool] = []
    look = eager_on_graph(lambda: seen.append(is_capturing()))
    with BreakableCUDAGraphCapture(graph, inline_breaks=True):
        look()
    assert seen == [True]


# Conveniences


def test_a_break_that_is_not_enabled_is_the_function_itself() -> None:
    def function() -> None: ...

    assert eager_on_graph(enable=False)(function) is function
    assert eager_on_graph(name="attention", enable=False)(function) is function


def test_a_break_that_is_not_enabled_is_part_of_the_segment(capture: Capture) -> None:
    @eager_on_graph(enable=False)
    def double(x: Tensor) -> Tensor:
        return x * 2

    graph, _ = capture(double, torch.ones(1))
    assert (len(graph.segments), len(graph.breaks)) == (1, 0)


def test_a_break_can_be_enabled_in_so_many_words(capture: Capture) -> None:
    graph, _ = capture(eager_on_graph(enable=True)(lambda: None))
    assert len(graph.breaks) == 1


def test_what_cannot_be_called_is_no_break() -> None:
    with pytest.raises(TypeError, match="enable="):
        eager_on_graph(True)  # type: ignore[call-overload]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine is one for CUDA there")
def test_a_graph_without_an_engine_makes_one_at_its_first_capture() -> None:
    graph, x = BreakableCUDAGraph(), torch.zeros(1)
    with BreakableCUDAGraphCapture(graph):
        x.add_(1)
        break_graph()
    graph.replay()
    assert x.tolist() == [1]
    assert isinstance(graph.engine, CPUSegmentEngine)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_without_an_engine_is_one_for_the_gpu_where_there_is_one() -> None:
    graph, x = BreakableCUDAGraph(), torch.zeros(1, device="cuda")
    with BreakableCUDAGraphCapture(graph):
        x.add_(1)
        break_graph()
    graph.replay()
    assert x.tolist() == [1]
    assert graph.engine.device.type == "cuda"
