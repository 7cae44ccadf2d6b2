"""Interrupts at every step of a capture's clean-up, and what a context variable would do to copied contexts."""

import contextlib
import contextvars
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

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
    assert not _get_current_dispatch_mode_stack() + _get_current_function_mode_stack()
    assert (torch.ones(2) + 1).tolist() == [2, 2]
    graph, x = BreakableCUDAGraph(engine), torch.zeros(1)
    with BreakableCUDAGraphCapture(graph):
        x.add_(1)
        break_graph()
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2]


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
            # A generator goes on where it is: a signal that comes then is raised inside of it, a trace's error is not.
            goes_on = frame.f_code.co_flags & inspect.CO_GENERATOR
            if event == "call" and ours and frame.f_code is not own and not goes_on:
                self.interrupt(frame, event, argument)

        tracing = sys.gettrace()  # coverage, for one
        sys.settrace(trace)
        try:
            super().__exit__(*details)
        finally:
            sys.settrace(tracing)


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
