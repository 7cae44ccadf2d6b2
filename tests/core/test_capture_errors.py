"""A capture that fails: the exception arrives as raised, nothing is published, and the next capture works."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CaptureError,
    CPUSegmentEngine,
    HostReadError,
    NestedCaptureError,
    break_graph,
    eager_on_graph,
)
from bcg_core.breaks import active_recorder
from bcg_core.cpu_segment import CPUSegment
from bcg_core.debug import WatchedEngine

Capture = Callable[..., Any]


class MistakeError(Exception):
    """What user code raises here; its identity and arguments must arrive."""


def fail(error: BaseException) -> None:
    raise error


def in_a_segment(x: Tensor, error: BaseException) -> None:
    x.add_(1)
    fail(error)


def in_a_break(x: Tensor, error: BaseException) -> None:
    x.add_(1)
    eager_on_graph(name="the break")(fail)(error)


def in_a_later_segment(x: Tensor, error: BaseException) -> None:
    break_graph()
    x.add_(1)
    fail(error)


def in_a_nested_break(x: Tensor, error: BaseException) -> None:
    x.add_(1)
    eager_on_graph(name="outer")(eager_on_graph(name="inner")(fail))(error)


PLACES = [in_a_segment, in_a_break, in_a_later_segment, in_a_nested_break]


@pytest.fixture(params=PLACES, ids=lambda place: place.__name__)
def place(request: pytest.FixtureRequest) -> Callable[[Tensor, BaseException], None]:
    return request.param


Place = Callable[[Tensor, BaseException], None]


@pytest.mark.parametrize("kind", [MistakeError, KeyError, KeyboardInterrupt, SystemExit])
def test_an_exception_reaches_the_caller_as_it_was_raised(
    capture: Capture, place: Place, kind: type[BaseException]
) -> None:
    error = kind("as it is")
    with pytest.raises(kind) as caught:
        capture(place, torch.zeros(1), error)
    assert caught.value is error
    assert error.args == ("as it is",)


def test_a_failed_capture_publishes_nothing(graph: BreakableCUDAGraph, place: Place) -> None:
    with pytest.raises(MistakeError), BreakableCUDAGraphCapture(graph):
        place(torch.zeros(1), MistakeError())
    assert (graph.captured, graph.segments, graph.breaks) == (False, (), ())


def test_a_failed_capture_writes_nothing(capture: Capture, place: Place) -> None:
    x = torch.zeros(1)
    with pytest.raises(MistakeError):
        capture(place, x, MistakeError())
    assert x.tolist() == [0]


def test_after_a_failed_capture_operations_run(capture: Capture, place: Place) -> None:
    with pytest.raises(MistakeError):
        capture(place, torch.zeros(1), MistakeError())
    assert (torch.ones(2) + 1).tolist() == [2, 2]


def test_after_a_failed_capture_no_recorder_is_active(capture: Capture, place: Place) -> None:
    with pytest.raises(MistakeError):
        capture(place, torch.zeros(1), MistakeError())
    assert active_recorder.get() is None


def test_after_a_failed_capture_the_same_graph_can_be_captured(
    graph: BreakableCUDAGraph, place: Place
) -> None:
    x = torch.zeros(1)
    with pytest.raises(MistakeError), BreakableCUDAGraphCapture(graph):
        place(x, MistakeError())
    with BreakableCUDAGraphCapture(graph):
        x.add_(5)
        break_graph()
    graph.replay()
    assert x.tolist() == [5]
    assert (len(graph.segments), len(graph.breaks)) == (2, 1)


def test_after_a_failed_capture_the_same_capture_object_can_be_used(
    graph: BreakableCUDAGraph, place: Place
) -> None:
    x = torch.zeros(1)
    capturing = BreakableCUDAGraphCapture(graph)
    with pytest.raises(MistakeError), capturing:
        place(x, MistakeError())
    with capturing:
        x.add_(5)
    graph.replay()
    assert x.tolist() == [5]
    assert (len(graph.segments), len(graph.breaks)) == (1, 0)


def test_a_failed_capture_object_keeps_no_half_built_segments(engine: CPUSegmentEngine) -> None:
    built: list[weakref.ref[CPUSegment]] = []

    class Watched(CPUSegmentEngine):
        def end(self) -> CPUSegment:
            segment = super().end()
            built.append(weakref.ref(segment))
            return segment

    capturing = BreakableCUDAGraphCapture(BreakableCUDAGraph(Watched()))
    with pytest.raises(MistakeError), capturing:
        in_a_later_segment(torch.zeros(1), MistakeError())
    gc.collect()
    assert [segment() for segment in built] == [None]


def test_other_graphs_of_the_engine_survive_a_failed_capture(
    capture: Capture, place: Place
) -> None:
    x = torch.zeros(1)
    good, _ = capture(lambda: x.add_(1))
    with pytest.raises(MistakeError):
        capture(place, torch.zeros(1), MistakeError())
    good.replay()
    assert x.tolist() == [1]


# Notes


def test_an_exception_in_a_break_at_capture_is_noted_with_the_break(capture: Capture) -> None:
    def run() -> None:
        break_graph()
        eager_on_graph(name="the break")(fail)(MistakeError())

    with pytest.raises(MistakeError) as caught:
        capture(run)
    assert caught.value.__notes__ == ["raised at capture in break 1 (the break)"]


def test_an_exception_in_a_segment_has_no_note(capture: Capture) -> None:
    with pytest.raises(MistakeError) as caught:
        capture(in_a_segment, torch.zeros(1), MistakeError())
    assert not hasattr(caught.value, "__notes__")


# At replay


class Failing:
    """A break that raises ``error``, if a test sets one."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.call = eager_on_graph(name="the break")(self._run)

    def _run(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", [MistakeError, KeyboardInterrupt, CaptureError])
def test_an_exception_in_a_break_at_replay_reaches_the_caller_as_raised(
    capture: Capture, kind: type[BaseException]
) -> None:
    breaks = Failing()
    graph, _ = capture(lambda: (break_graph(), breaks.call()))
    breaks.error = kind("as it is")
    with pytest.raises(kind) as caught:
        graph.replay()
    assert caught.value is breaks.error
    assert caught.value.__notes__ == ["raised at replay in break 1 (the break)"]


def test_an_exception_that_is_raised_again_is_noted_once(capture: Capture) -> None:
    breaks = Failing()
    graph, _ = capture(breaks.call)
    breaks.error = MistakeError()
    for _ in range(2):
        with pytest.raises(MistakeError) as caught:
            graph.replay()
    assert caught.value.__notes__ == ["raised at replay in break 0 (the break)"]


def test_an_exception_at_replay_ends_the_replay_there(capture: Capture) -> None:
    breaks, x = Failing(), torch.zeros(1)
    graph, _ = capture(lambda: (x.add_(1), breaks.call(), x.add_(10)))
    breaks.error = MistakeError()
    with pytest.raises(MistakeError):
        graph.replay()
    assert x.tolist() == [1]


def test_a_graph_replays_again_after_an_exception_at_replay(capture: Capture) -> None:
    breaks, x = Failing(), torch.zeros(1)
    graph, _ = capture(lambda: (x.fill_(1), breaks.call(), x.add_(10)))
    breaks.error = MistakeError()
    with pytest.raises(MistakeError):
        graph.replay()
    breaks.error = None
    graph.replay()
    assert x.tolist() == [11]


def test_after_an_exception_at_replay_another_graph_can_be_captured(capture: Capture) -> None:
    breaks, x = Failing(), torch.zeros(1)
    graph, _ = capture(breaks.call)
    breaks.error = MistakeError()
    with pytest.raises(MistakeError):
        graph.replay()
    other, _ = capture(lambda: x.add_(1))
    other.replay()
    assert x.tolist() == [1]


# Swallowed


def test_a_failed_break_that_is_swallowed_makes_the_capture_fail(
    graph: BreakableCUDAGraph,
) -> None:
    error = MistakeError()
    capturing = BreakableCUDAGraphCapture(graph)
    with pytest.raises(CaptureError, match="swallowed the exception") as caught, capturing:
        quietly(lambda: in_a_break(torch.zeros(1), error))
    assert caught.value.__cause__ is error
    assert not graph.captured


def test_after_a_swallowed_failure_the_next_break_is_refused(capture: Capture) -> None:
    def run() -> None:
        quietly(lambda: in_a_break(torch.zeros(1), error))
        break_graph()

    error = MistakeError()
    with pytest.raises(CaptureError, match="the capture has failed already") as caught:
        capture(run)
    assert caught.value.__cause__ is error


def test_a_swallowed_host_read_fails_at_the_next_break(capture: Capture) -> None:
    def run() -> None:
        quietly(lambda: torch.ones(1).item())
        break_graph()

    with pytest.raises(CaptureError, match="became invalid") as caught:
        capture(run)
    assert isinstance(caught.value.__cause__, HostReadError)
    assert caught.value.__notes__ == ["raised at capture in segment 0"]


def test_a_swallowed_host_read_in_the_last_segment_is_noted_with_it(capture: Capture) -> None:
    def run() -> None:
        break_graph()
        quietly(lambda: torch.ones(1).item())

    with pytest.raises(CaptureError, match="became invalid") as caught:
        capture(run)
    assert caught.value.__notes__ == ["raised at capture in segment 1"]


def test_an_operation_error_that_is_swallowed_is_no_failure(capture: Capture) -> None:
    # As on CUDA: a mistaken call raises on the host and leaves the capture as it was.
    def run(x: Tensor) -> Tensor:
        quietly(lambda: torch.mm(x, x))
        return x + 1

    graph, result = capture(run, torch.zeros(2, 3))
    graph.replay()
    assert torch.equal(result, torch.ones(2, 3))


def quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except (MistakeError, RuntimeError):
        return
    pytest.fail("nothing was raised")


# Captures and replays inside of captures


def test_a_capture_inside_of_a_capture_is_refused(engine: CPUSegmentEngine) -> None:
    outer, inner = BreakableCUDAGraph(engine), BreakableCUDAGraph(engine)
    with (
        pytest.raises(NestedCaptureError, match="finish the outer one first"),
        BreakableCUDAGraphCapture(outer),
        BreakableCUDAGraphCapture(inner),
    ):
        pytest.fail("the inner capture began")
    assert not outer.captured
    assert not inner.captured


def test_a_capture_inside_of_a_break_is_refused(engine: CPUSegmentEngine) -> None:
    outer, inner = BreakableCUDAGraph(engine), BreakableCUDAGraph(engine)
    nested = eager_on_graph(lambda: BreakableCUDAGraphCapture(inner).__enter__())
    with pytest.raises(NestedCaptureError), BreakableCUDAGraphCapture(outer):
        nested()
    assert not inner.captured


def test_a_refused_inner_capture_leaves_the_outer_one_going(engine: CPUSegmentEngine) -> None:
    outer, inner = BreakableCUDAGraph(engine), BreakableCUDAGraph(engine)
    x = torch.zeros(1)
    with BreakableCUDAGraphCapture(outer):
        x.add_(1)
        with pytest.raises(NestedCaptureError):
            BreakableCUDAGraphCapture(inner).__enter__()
        x.mul_(3)
    outer.replay()
    assert x.tolist() == [3]


def test_a_replay_inside_of_a_capture_is_refused(
    capture: Capture, engine: CPUSegmentEngine
) -> None:
    graph, _ = capture(lambda: None)
    with (
        pytest.raises(NestedCaptureError, match="cannot be replayed inside a segment of a capture"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)),
    ):
        graph.replay()


# Replays in breaks


def other_graph(work: Callable[[], Any]) -> BreakableCUDAGraph:
    """Capture ``work`` with an engine of its own."""
    graph = BreakableCUDAGraph(CPUSegmentEngine())
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        work()
    return graph


def test_a_graph_is_replayed_in_a_break_at_capture_and_at_replay(capture: Capture) -> None:
    x = torch.zeros(1)
    inner = other_graph(lambda: x.add_(1))
    outer, _ = capture(lambda: (eager_on_graph(inner.replay)(), x.mul_(2)))
    assert x.tolist() == [1]
    outer.replay()
    assert x.tolist() == [4]


def test_a_graph_of_the_same_engine_is_not_replayed_in_a_break_at_capture(
    capture: Capture,
) -> None:
    inner, _ = capture(lambda: None)
    with pytest.raises(NestedCaptureError, match="during a capture of the same engine"):
        capture(eager_on_graph(inner.replay))


def test_a_graph_of_the_same_engine_is_not_replayed_in_a_break_at_replay(
    capture: Capture,
) -> None:
    inner, _ = capture(lambda: None)
    state = SimpleNamespace(replaying=False)
    nested = eager_on_graph(lambda: inner.replay() if state.replaying else None)
    outer, _ = capture(nested)
    state.replaying = True
    with pytest.raises(NestedCaptureError, match="during a replay of the same engine"):
        outer.replay()
    state.replaying = False
    outer.replay()


def test_a_graph_of_an_engine_that_is_watched_is_of_the_same_engine(
    capture: Capture, engine: CPUSegmentEngine
) -> None:
    inner = BreakableCUDAGraph(WatchedEngine(engine))
    with BreakableCUDAGraphCapture(inner):
        pass
    with pytest.raises(NestedCaptureError, match="during a capture of the same engine"):
        capture(eager_on_graph(inner.replay))


def test_a_graph_that_is_replayed_inside_of_a_segment_is_refused_at_its_replay(
    capture: Capture,
) -> None:
    inner = other_graph(lambda: None)
    with pytest.raises(NestedCaptureError, match="inside a segment"):
        capture(lambda: (break_graph(), inner.replay()))


def test_a_replay_in_a_break_that_is_part_of_the_segment_is_refused(
    graph: BreakableCUDAGraph,
) -> None:
    replay = eager_on_graph(other_graph(lambda: None).replay)
    with (
        pytest.raises(NestedCaptureError, match="inside a segment"),
        BreakableCUDAGraphCapture(graph, inline_breaks=True),
    ):
        replay()


def test_graphs_are_replayed_in_breaks_of_breaks(capture: Capture) -> None:
    x = torch.zeros(1)
    innermost = other_graph(lambda: x.add_(1))
    middle = other_graph(lambda: (eager_on_graph(innermost.replay)(), x.mul_(2)))
    outer, _ = capture(lambda: (eager_on_graph(middle.replay)(), x.add_(10)))
    x.zero_()
    outer.replay()
    assert x.tolist() == [12]


def test_after_an_error_in_a_graph_in_a_break_all_are_replayed_again(capture: Capture) -> None:
    breaks, x = Failing(), torch.zeros(1)
    inner = other_graph(lambda: (x.add_(1), breaks.call()))
    outer, _ = capture(eager_on_graph(inner.replay))
    x.zero_()
    breaks.error = MistakeError()
    with pytest.raises(MistakeError):
        outer.replay()
    breaks.error = None
    outer.replay()
    assert x.tolist() == [2]


class NeverBusyEngine(CPUSegmentEngine):
    """An engine that forgets what it is used for."""

    busy = property(lambda self: None, lambda self, use: None)  # type: ignore[assignment]


def test_without_knowing_its_use_a_graph_is_replayed_inside_of_itself() -> None:
    state = SimpleNamespace(graph=None, depth=0)
    x = torch.zeros(1)

    def again() -> None:
        state.depth += 1
        if state.graph is not None and state.depth < 3:
            state.graph.replay()

    graph = BreakableCUDAGraph(NeverBusyEngine())
    with BreakableCUDAGraphCapture(graph):
        x.fill_(1)
        eager_on_graph(again)()
        x.add_(1)
    state.graph = graph
    graph.replay()
    assert x.tolist() == [3]  # without the replay inside: 2


def test_a_graph_is_not_replayed_in_itself(capture: Capture) -> None:
    state = SimpleNamespace(graph=None)
    again = eager_on_graph(lambda: state.graph.replay() if state.graph else None)
    state.graph, _ = capture(again)
    with pytest.raises(NestedCaptureError, match="during a replay of the same engine"):
        state.graph.replay()


def test_a_capture_inside_of_a_break_of_a_capture_is_refused(capture: Capture) -> None:
    other = BreakableCUDAGraph(CPUSegmentEngine())
    with pytest.raises(NestedCaptureError, match="cannot be started inside a capture"):
        capture(eager_on_graph(BreakableCUDAGraphCapture(other).__enter__))


# Engines that fail


class BrokenEngine(CPUSegmentEngine):
    """An engine that fails where a test says, and notes what is asked of it."""

    def __init__(self, fails_at: str) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.calls: list[str] = []

    def _note(self, what: str) -> None:
        self.calls.append(what)
        if self.calls.count(what) == 1 and what == self.fails_at:
            raise MistakeError(what)

    def begin(self) -> None:
        self._note("begin")
        super().begin()

    def end(self) -> CPUSegment:
        self._note("end")
        return super().end()

    def abort(self) -> None:
        self.calls.append("abort")
        super().abort()


@pytest.mark.parametrize("fails_at", ["begin", "end"])
def test_an_engine_that_fails_is_aborted_and_usable_again(fails_at: str) -> None:
    engine = BrokenEngine(fails_at)
    graph, x = BreakableCUDAGraph(engine), torch.zeros(1)
    with pytest.raises(MistakeError, match=fails_at), BreakableCUDAGraphCapture(graph):
        x.add_(1)
    assert engine.calls[-1] == "abort"
    assert active_recorder.get() is None
    with BreakableCUDAGraphCapture(graph):
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1]


def test_an_engine_that_fails_to_begin_after_a_break_is_aborted() -> None:
    class FailsSecond(BrokenEngine):
        def begin(self) -> None:
            self.calls.append("begin")
            if self.calls.count("begin") == 2:
                raise MistakeError
            CPUSegmentEngine.begin(self)

    engine = FailsSecond("")
    graph = BreakableCUDAGraph(engine)
    with pytest.raises(MistakeError) as caught, BreakableCUDAGraphCapture(graph):
        break_graph()
    assert caught.value.__notes__ == ["raised at capture in segment 1"]
    assert engine.calls == ["begin", "end", "begin", "abort"]
    assert not graph.captured
