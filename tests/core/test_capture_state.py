"""Who is inside a capture, and that everybody is outside again when it is over, whatever happened."""

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CPUSegmentEngine,
    NestedCaptureError,
    break_graph,
    eager_on_graph,
    engine_for,
    is_capturing,
)
from bcg_core.breaks import active_recorder

Capture = Callable[..., Any]


# What is_capturing says


def test_a_segment_is_captured_and_a_break_is_not(capture: Capture) -> None:
    said = {"before": is_capturing()}
    look = eager_on_graph(lambda: said.update(in_break=is_capturing()))
    capture(lambda: (said.update(in_segment=is_capturing()), look()))
    said["after"] = is_capturing()
    assert said == {"before": False, "in_segment": True, "in_break": False, "after": False}


def test_inline_breaks_are_captured(graph: BreakableCUDAGraph) -> None:
    said = []
    look = eager_on_graph(lambda: said.append(is_capturing()))
    with BreakableCUDAGraphCapture(graph, inline_breaks=True):
        look()
    assert said == [True]


def test_a_replay_is_no_capture(capture: Capture) -> None:
    said: list[bool] = []
    graph, _ = capture(eager_on_graph(lambda: said.append(is_capturing())))
    graph.replay()
    assert said == [False, False]


# Contexts and threads


def captured_with(graph: BreakableCUDAGraph, work: Callable[[], Any]) -> None:
    """Capture a segment, a break that does ``work``, and another segment."""
    with BreakableCUDAGraphCapture(graph):
        torch.ones(1).add(1)
        eager_on_graph(work)()
        torch.ones(1).add(1)


def test_a_context_that_was_copied_in_a_break_is_outside_afterwards(
    graph: BreakableCUDAGraph, capture: Capture
) -> None:
    kept: list[contextvars.Context] = []
    captured_with(graph, lambda: kept.append(contextvars.copy_context()))
    kept[0].run(graph.replay)
    assert kept[0].run(is_capturing) is False


def test_a_task_that_a_break_started_captures_and_replays_later(
    engine: CPUSegmentEngine,
) -> None:
    async def later() -> bool:
        other = BreakableCUDAGraph(CPUSegmentEngine())
        with BreakableCUDAGraphCapture(other):
            break_graph()
        other.replay()
        return True

    async def serve() -> bool:
        tasks: list[asyncio.Task[bool]] = []
        captured_with(
            BreakableCUDAGraph(engine), lambda: tasks.append(asyncio.create_task(later()))
        )
        return await tasks[0]

    assert asyncio.run(serve())


def test_another_thread_with_a_copied_context_records_nothing(graph: BreakableCUDAGraph) -> None:
    ran: list[str] = []
    note = eager_on_graph(lambda: ran.append("note"))

    def work() -> None:
        context = contextvars.copy_context()
        thread = Thread(target=lambda: context.run(note))
        thread.start()
        thread.join()

    captured_with(graph, work)
    assert len(graph.breaks) == 1
    assert ran == ["note"]


# Interrupts in the clean-up


class Interrupted(CPUSegmentEngine):
    """An engine whose clean-up is interrupted at one step."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def _interrupt(self, step: str) -> None:
        if step == self.step:
            self.step = ""
            raise KeyboardInterrupt

    def end(self) -> Any:
        self._interrupt("end")
        return super().end()

    def abort(self) -> None:
        super().abort()
        self._interrupt("abort")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with super().capturing():
            try:
                yield
            finally:
                self._interrupt("capturing")


@pytest.mark.parametrize(
    ("step", "fails"),
    [
        ("end", False),
        ("abort", False),
        ("abort", True),
        ("capturing", False),
        ("capturing", True),
    ],
    ids=lambda value: {True: "after an error", False: "after success"}.get(value, value),
)
def test_an_interrupt_in_the_clean_up_leaves_nobody_inside(step: str, fails: bool) -> None:
    engine = Interrupted(step)
    graph = BreakableCUDAGraph(engine)

    def run() -> None:
        with BreakableCUDAGraphCapture(graph):
            torch.ones(1).add(1)
            if fails:
                raise ValueError("a mistake")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert active_recorder.get() is None
    assert engine.busy is None
    graph.reset()
    with BreakableCUDAGraphCapture(graph):
        break_graph()
    graph.replay()


# Engines


def test_a_graph_makes_its_engine_when_it_is_needed() -> None:
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph):
        break_graph()
    graph.replay()
    assert graph.engine.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_graph_keeps_the_engine_that_it_made() -> None:
    graph = BreakableCUDAGraph()
    assert graph.engine is graph.engine


@pytest.mark.parametrize("place", ["segment", "break"])
def test_no_engine_is_made_inside_a_capture(capture: Capture, place: str) -> None:
    make = (lambda: engine_for("cpu") and None) if place == "segment" else None
    with pytest.raises(NestedCaptureError, match="an engine cannot be made inside a capture"):
        capture(make or eager_on_graph(lambda: engine_for("cpu") and None))


# Breaks that are none


def test_a_break_can_be_disabled(capture: Capture) -> None:
    def fn(x: int) -> int:
        return x

    assert eager_on_graph(enable=False)(fn) is fn
    graph, _ = capture(lambda: eager_on_graph(enable=False)(fn)(1))
    assert graph.breaks == ()


def test_a_break_can_be_enabled_by_word(capture: Capture) -> None:
    graph, _ = capture(lambda: eager_on_graph(enable=True, name="mine")(lambda: None)())
    assert [each.name for each in graph.breaks] == ["mine"]
