"""Breaks: what they are outside of a capture, how a capture records them, and what a replay does with them."""

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    Break,
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CaptureError,
    break_graph,
    eager_on_graph,
)

Capture = Callable[..., Any]


# Outside of a capture


def test_outside_of_a_capture_a_break_is_a_plain_call() -> None:
    @eager_on_graph
    def double(x: int, *, plus: int = 0) -> int:
        return 2 * x + plus

    assert double(4, plus=1) == 9


def test_bare_a_break_is_called_after_its_function() -> None:
    @eager_on_graph
    def attention() -> None: ...

    assert attention.name.endswith("attention")


def test_a_break_can_be_given_a_name() -> None:
    @eager_on_graph(name="attention of layer 3")
    def attention() -> int:
        return 1

    assert attention.name == "attention of layer 3"
    assert attention() == 1


def test_a_callable_without_a_name_is_called_by_its_repr() -> None:
    class Callee:
        def __call__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "<callee>"

    marked = eager_on_graph(Callee())
    assert marked.name == "<callee>"
    assert marked() == 7


def test_a_break_keeps_documentation_and_signature() -> None:
    @eager_on_graph
    def documented(x: int) -> int:
        """Say what it does."""
        return x

    assert isinstance(documented, Break)
    assert documented.__doc__ == "Say what it does."
    assert list(inspect.signature(documented).parameters) == ["x"]


def test_a_method_can_be_a_break(capture: Capture) -> None:
    class Layer:
        def __init__(self) -> None:
            self.scale = 2

        @eager_on_graph
        def attend(self, x: Tensor) -> None:
            x.mul_(self.scale)

    layer, x = Layer(), torch.ones(2)
    graph, _ = capture(lambda: layer.attend(x))
    layer.scale = 5
    x.fill_(1)
    graph.replay()
    assert x.tolist() == [5, 5]


def test_a_method_that_is_a_break_can_be_reached_through_its_class() -> None:
    class Layer:
        @eager_on_graph
        def attend(self, x: int) -> int:
            return x + 1

    assert isinstance(Layer.attend, Break)
    assert Layer.attend(Layer(), 1) == 2


def test_an_exception_of_a_plain_call_is_left_alone() -> None:
    @eager_on_graph
    def fail() -> None:
        raise ZeroDivisionError("as it is")

    with pytest.raises(ZeroDivisionError, match="as it is") as caught:
        fail()
    assert not hasattr(caught.value, "__notes__")


def test_break_graph_outside_of_a_capture_does_nothing() -> None:
    assert break_graph() is None


# In a capture


def test_a_break_runs_once_at_capture_and_once_at_each_replay(capture: Capture) -> None:
    runs: list[int] = []
    note = eager_on_graph(lambda: runs.append(1))
    graph, _ = capture(note)
    assert len(runs) == 1
    graph.replay()
    graph.replay()
    assert len(runs) == 3


@pytest.mark.parametrize("breaks", [0, 1, 2, 7, 40])
def test_there_is_one_segment_more_than_breaks(capture: Capture, breaks: int) -> None:
    def run(x: Tensor) -> None:
        for _ in range(breaks):
            x.add_(1)
            break_graph()

    graph, _ = capture(run, torch.zeros(2))
    assert (len(graph.segments), len(graph.breaks)) == (breaks + 1, breaks)


def test_many_breaks_are_replayed_in_order(capture: Capture) -> None:
    double = eager_on_graph(lambda x: x.mul_(2))

    def run(x: Tensor) -> None:
        for _ in range(5):
            x.add_(1)
            double(x)

    x = torch.zeros(1)
    graph, _ = capture(run, x)
    x.zero_()
    graph.replay()
    assert x.tolist() == [62]


def test_an_empty_capture_has_one_segment_and_replays(capture: Capture) -> None:
    graph, _ = capture(lambda: None)
    graph.replay()
    assert (len(graph.segments), len(graph.breaks)) == (1, 0)


def test_consecutive_breaks_have_empty_segments_between_them(capture: Capture) -> None:
    order: list[str] = []
    first, second = (eager_on_graph(lambda name=name: order.append(name)) for name in "ab")
    graph, _ = capture(lambda: (first(), second(), first()))
    order.clear()
    graph.replay()
    assert order == ["a", "b", "a"]
    assert [segment.operations for segment in graph.segments] == [(), (), (), ()]


def test_breaks_at_the_very_start_and_end_are_recorded(capture: Capture) -> None:
    double = eager_on_graph(lambda x: x.mul_(2))
    x = torch.ones(1)
    graph, _ = capture(lambda: (double(x), x.add_(1), double(x)))
    x.fill_(1)
    graph.replay()
    assert x.tolist() == [6]


def test_work_that_a_break_leaves_to_another_thread_is_in_no_segment(
    capture: Callable[..., tuple[BreakableCUDAGraph, Any]],
) -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    threads, go = list[threading.Thread](), threading.Event()

    @eager_on_graph
    def leave() -> None:
        threads.append(threading.Thread(target=lambda: (go.wait(10), x.add_(1))))
        threads[-1].start()

    def work() -> None:
        leave()
        y.add_(1)
        go.set()
        threads[-1].join()

    graph, _ = capture(work)
    assert (x.item(), y.item()) == (1, 0)
    graph.replay()
    threads[-1].join()
    assert (x.item(), y.item()) == (2, 1)


def test_a_break_nested_in_a_break_runs_inline(capture: Capture) -> None:
    inner = eager_on_graph(lambda x: x.add_(1))
    outer = eager_on_graph(lambda x: inner(x).mul_(10))
    x = torch.zeros(1)
    graph, _ = capture(outer, x)
    x.zero_()
    graph.replay()
    assert x.tolist() == [10]
    assert len(graph.breaks) == 1


def test_break_graph_inside_of_a_break_does_nothing(capture: Capture) -> None:
    graph, _ = capture(eager_on_graph(lambda: break_graph()))
    assert len(graph.breaks) == 1


def test_breaks_are_numbered_and_named(capture: Capture) -> None:
    one, two = (eager_on_graph(name=name)(lambda: None) for name in ("one", "two"))
    graph, _ = capture(lambda: (one(), two(), one()))
    assert [(b.index, b.name) for b in graph.breaks] == [(0, "one"), (1, "two"), (2, "one")]


def test_segments_do_not_run_while_a_break_runs_at_capture(capture: Capture) -> None:
    x = torch.zeros(1)
    seen: list[float] = []
    look = eager_on_graph(lambda: seen.append(x.item()))
    graph, _ = capture(lambda: (x.add_(1), look()))
    graph.replay()
    assert seen == [0, 1]


def test_operations_of_a_break_are_not_recorded(capture: Capture) -> None:
    add = eager_on_graph(lambda x: x.add_(1))
    graph, _ = capture(add, torch.zeros(1))
    assert [segment.operations for segment in graph.segments] == [(), ()]


def test_a_thread_started_in_a_capture_is_outside_of_it(capture: Capture) -> None:
    runs: list[int] = []
    note = eager_on_graph(lambda: runs.append(1))

    def run() -> None:
        thread = threading.Thread(target=note)
        thread.start()
        thread.join()

    graph, _ = capture(run)
    assert runs == [1]
    assert len(graph.breaks) == 0


# Arguments


def test_tensor_arguments_are_read_at_their_address(capture: Capture) -> None:
    seen: list[list[float]] = []
    look = eager_on_graph(lambda x: seen.append(x.tolist()))
    x = torch.zeros(2)
    graph, _ = capture(look, x)
    x.fill_(3)
    graph.replay()
    assert seen[-1] == [3, 3]


def test_keyword_arguments_are_recorded(capture: Capture) -> None:
    seen: list[Any] = []
    look = eager_on_graph(lambda **arguments: seen.append(arguments))
    graph, _ = capture(lambda: look(layer=3, scale=0.5))
    graph.replay()
    assert seen == [{"layer": 3, "scale": 0.5}] * 2


def test_numbers_are_frozen_at_capture(capture: Capture) -> None:
    seen: list[int] = []
    look = eager_on_graph(lambda offset: seen.append(offset))
    state = {"offset": 0}
    graph, _ = capture(lambda: look(state["offset"]))
    state["offset"] = 5
    graph.replay()
    assert seen == [0, 0]


def test_an_object_passed_by_identity_is_live(capture: Capture) -> None:
    seen: list[int] = []
    look = eager_on_graph(lambda state: seen.append(state.offset))
    state = SimpleNamespace(offset=0)
    graph, _ = capture(look, state)
    state.offset = 5
    graph.replay()
    assert seen == [0, 5]


def test_rebinding_a_name_after_capture_does_not_reach_the_break(capture: Capture) -> None:
    seen: list[Tensor] = []
    look = eager_on_graph(lambda x: seen.append(x))
    x = captured = torch.zeros(2)
    graph, _ = capture(look, x)
    x = x + 1
    graph.replay()
    assert seen[-1] is captured


# Graphs


def test_what_a_break_writes_is_read_by_the_next_segment(capture: Capture) -> None:
    fill = eager_on_graph(lambda x, state: x.fill_(state.value))
    state = SimpleNamespace(value=1.0)

    def run(x: Tensor) -> Tensor:
        fill(x, state)
        return x + 1

    graph, result = capture(run, torch.zeros(2))
    state.value = 41.0
    graph.replay()
    assert result.tolist() == [42, 42]


def test_a_break_sees_what_the_segment_before_it_computed(capture: Capture) -> None:
    seen: list[list[float]] = []
    look = eager_on_graph(lambda y: seen.append(y.tolist()))
    x = torch.ones(2)
    graph, _ = capture(lambda: look(x + 1))
    x.fill_(4)
    graph.replay()
    assert seen[-1] == [5, 5]


def test_a_shape_that_a_break_changed_is_the_one_that_is_recorded(capture: Capture) -> None:
    x = torch.ones(4)
    shorten = eager_on_graph(lambda: (x.resize_(3), None)[1])
    graph, (_, _, doubled) = capture(lambda: (x.add_(1), shorten(), x * 2))
    assert doubled.shape == (3,)
    graph.replay()
    assert doubled.tolist() == [4, 4, 4]


def test_two_graphs_of_one_engine_replay_in_any_order(capture: Capture) -> None:
    add = eager_on_graph(lambda y: y.add_(100))
    x = torch.ones(2)
    first, one = capture(lambda: add(x + 1))
    second, two = capture(lambda: add(x + 2))
    first.replay()
    second.replay()
    first.replay()
    assert (one.tolist(), two.tolist()) == ([102, 102], [103, 103])


def test_a_graph_is_captured_only_after_the_block(graph: BreakableCUDAGraph) -> None:
    with BreakableCUDAGraphCapture(graph) as entered:
        assert entered is graph
        assert not graph.captured
    assert graph.captured


def test_a_graph_that_was_never_captured_cannot_be_replayed(graph: BreakableCUDAGraph) -> None:
    with pytest.raises(CaptureError, match="nothing to replay: capture into this graph first"):
        graph.replay()


def test_a_graph_cannot_be_captured_twice(graph: BreakableCUDAGraph, capture: Capture) -> None:
    captured, _ = capture(lambda: None)
    with pytest.raises(CaptureError, match=r"captured already: call reset\(\) first"):
        BreakableCUDAGraphCapture(captured).__enter__()


def test_a_refused_second_capture_leaves_the_graph_as_it_was(capture: Capture) -> None:
    x = torch.zeros(1)
    graph, _ = capture(lambda: x.add_(1))
    with pytest.raises(CaptureError):
        BreakableCUDAGraphCapture(graph).__enter__()
    graph.replay()
    assert x.tolist() == [1]


def test_reset_empties_a_graph(capture: Capture) -> None:
    graph, _ = capture(break_graph)
    graph.reset()
    assert (graph.captured, graph.segments, graph.breaks) == (False, (), ())
    with pytest.raises(CaptureError, match="nothing to replay"):
        graph.replay()


def test_a_graph_can_be_captured_anew_after_reset(capture: Capture) -> None:
    x = torch.zeros(1)
    graph, _ = capture(lambda: x.add_(1))
    graph.reset()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        x.add_(10)
    graph.replay()
    assert x.tolist() == [10]


def test_what_cannot_be_called_is_no_break() -> None:
    with pytest.raises(TypeError, match="enable="):
        eager_on_graph(True)  # type: ignore[call-overload]
