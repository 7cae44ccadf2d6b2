"""The hidden-output detector: what leaves a break passes through its result."""

from collections.abc import Callable
from contextlib import suppress
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
    HiddenOutputError,
    break_graph,
    eager_on_graph,
)
from bcg_core.debug import HiddenOutputDetector, WatchedEngine

Make = Callable[..., Any]


class SideChannel:
    """A break that leaves its result in an attribute, where the next segment finds it."""

    def __init__(self) -> None:
        self.cache = torch.zeros(2)

    @eager_on_graph(name="triple")
    def triple(self, x: Tensor) -> None:
        self.cache = 3 * x

    def run(self, x: Tensor) -> Tensor:
        self.triple(x)
        return self.cache + 1


@pytest.fixture
def capture(watched_capture: Make) -> Make:
    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return watched_capture(fn, *args, tools=[HiddenOutputDetector()])

    return run


def test_a_side_channel_is_refused_with_break_and_operation(capture: Make) -> None:
    with pytest.raises(
        HiddenOutputError,
        match=r"break 0 \(triple\) made a \(2,\) torch\.float32 tensor \(aten::mul\.Tensor\) and did not return it, "
        r"but aten::add\.Tensor in segment 1 uses it",
    ):
        capture(SideChannel().run, torch.ones(2))


def test_a_side_channel_that_is_read_segments_later_is_refused(capture: Make) -> None:
    channel = SideChannel()

    def run(x: Tensor) -> Tensor:
        channel.triple(x)
        break_graph()
        break_graph()
        return channel.cache + 1

    with pytest.raises(HiddenOutputError, match=r"break 0 .* in segment 3 uses it"):
        capture(run, torch.ones(2))


def test_a_view_of_a_hidden_tensor_is_refused(capture: Make) -> None:
    channel = SideChannel()

    def run(x: Tensor) -> Tensor:
        channel.triple(x)
        return channel.cache[1:] + 1

    with pytest.raises(HiddenOutputError):
        capture(run, torch.ones(2))


def test_writing_to_a_hidden_tensor_is_refused(capture: Make) -> None:
    channel = SideChannel()

    def run(x: Tensor) -> None:
        channel.triple(x)
        channel.cache.add_(1)

    with pytest.raises(HiddenOutputError, match="add_"):
        capture(run, torch.ones(2))


def test_a_hidden_tensor_given_to_a_later_break_is_refused(capture: Make) -> None:
    # The argument is frozen: at replay the later break gets the tensor of the capture.
    channel, look = SideChannel(), eager_on_graph(lambda x: None, name="look")

    def run(x: Tensor) -> None:
        channel.triple(x)
        look(channel.cache)

    with pytest.raises(HiddenOutputError, match=r"an argument of break 1 \(look\) uses it"):
        capture(run, torch.ones(2))


@pytest.mark.parametrize(
    "make",
    [lambda: torch.tensor([1.0, 2.0]), lambda: torch.ones(2), lambda: torch.empty(2)],
    ids=["tensor", "ones", "empty"],
)
def test_a_tensor_made_of_nothing_is_refused(capture: Make, make: Callable[[], Tensor]) -> None:
    held: list[Tensor] = []
    leave = eager_on_graph(lambda: held.append(make()))

    def run() -> Tensor:
        leave()
        return held[0] + 1

    with pytest.raises(HiddenOutputError):
        capture(run)


def test_a_refusal_that_the_model_swallows_fails_the_capture_all_the_same(capture: Make) -> None:
    channel = SideChannel()

    def run(x: Tensor) -> None:
        with suppress(HiddenOutputError):
            channel.run(x)

    with pytest.raises(HiddenOutputError):
        capture(run, torch.ones(2))


def test_a_swallowed_refusal_of_an_argument_fails_the_capture_all_the_same(capture: Make) -> None:
    channel, look = SideChannel(), eager_on_graph(lambda x: None)

    def run(x: Tensor) -> None:
        channel.triple(x)
        with suppress(HiddenOutputError):
            look(channel.cache)

    with pytest.raises(CaptureError) as raised:
        capture(run, torch.ones(2))
    assert isinstance(raised.value.__cause__, HiddenOutputError)


def test_after_a_refusal_the_engine_captures_again() -> None:
    engine = WatchedEngine(CPUSegmentEngine(), [HiddenOutputDetector()])
    graph, x = BreakableCUDAGraph(engine), torch.ones(2)
    with pytest.raises(HiddenOutputError), BreakableCUDAGraphCapture(graph):
        SideChannel().run(x)
    assert not graph.captured
    with BreakableCUDAGraphCapture(graph):
        result = x + 1
    graph.replay()
    assert result.tolist() == [2, 2]


# What is right


def returned(x: Tensor, state: SimpleNamespace) -> Tensor:
    return eager_on_graph(lambda: 3 * x)() + 1


def returned_in_a_nest(x: Tensor, state: SimpleNamespace) -> Tensor:
    return eager_on_graph(lambda: {"a": [3 * x], "b": None})()["a"][0] + 1


def returned_as_a_view(x: Tensor, state: SimpleNamespace) -> Tensor:
    return eager_on_graph(lambda: (3 * x).view(2, 1)[:, 0])() + 1


def returned_and_kept(x: Tensor, state: SimpleNamespace) -> Tensor:
    @eager_on_graph
    def keep() -> Tensor:
        state.kept = 3 * x
        return state.kept

    keep()
    return state.kept + 1


def returned_by_a_later_break(x: Tensor, state: SimpleNamespace) -> Tensor:
    @eager_on_graph
    def keep() -> None:
        state.kept = 3 * x

    keep()
    return eager_on_graph(lambda: state.kept)() + 1


def written_in_place(x: Tensor, state: SimpleNamespace) -> Tensor:
    @eager_on_graph
    def write() -> None:
        state.old.copy_(3 * x)

    write()
    return state.old + 1


def written_by_out(x: Tensor, state: SimpleNamespace) -> Tensor:
    @eager_on_graph
    def write() -> None:
        state.kept = torch.mul(x, 3, out=state.old)

    write()
    return state.kept + 1


def kept_view_of_an_argument(x: Tensor, state: SimpleNamespace) -> Tensor:
    @eager_on_graph
    def keep(x: Tensor) -> None:
        state.kept = x[:]

    keep(x)
    return 3 * state.kept + 1


def used_in_the_break_first(x: Tensor, state: SimpleNamespace) -> Tensor:
    eager_on_graph(lambda: state.old.sum())()
    return 3 * x + state.one


def used_by_a_later_break_alone(x: Tensor, state: SimpleNamespace) -> Tensor:
    @eager_on_graph
    def keep() -> None:
        state.kept = 3 * x

    keep()
    return eager_on_graph(lambda: state.kept + 1)() * 1


def dropped(x: Tensor, state: SimpleNamespace) -> Tensor:
    @eager_on_graph
    def churn() -> None:
        for _ in range(100):
            torch.ones(2) * 2

    churn()
    return 3 * x + 1


@pytest.mark.parametrize(
    "forward",
    [
        returned,
        returned_in_a_nest,
        returned_as_a_view,
        returned_and_kept,
        returned_by_a_later_break,
        written_in_place,
        written_by_out,
        kept_view_of_an_argument,
        used_in_the_break_first,
        used_by_a_later_break_alone,
        dropped,
    ],
    ids=lambda forward: forward.__name__,
)
def test_what_is_right_is_accepted_and_replays(
    capture: Make, forward: Callable[[Tensor, SimpleNamespace], Tensor]
) -> None:
    x, state = torch.ones(2), SimpleNamespace(old=torch.zeros(2), one=torch.ones(2))
    graph, result = capture(forward, x, state)
    x.fill_(5)
    graph.replay()
    assert result.tolist() == [16, 16]


def test_a_runner_refuses_a_model_with_a_side_channel(
    make_watched: Make, toy_model: type[Any]
) -> None:
    class Hiding(toy_model):
        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            @eager_on_graph(name="hide")
            def hide() -> None:
                self.hidden = torch.ones(16)

            hide()
            return super().forward(input_ids_T, positions_T, ctx) * self.hidden

    with pytest.raises(HiddenOutputError, match=r"break 0 \(hide\)"):
        make_watched(model=Hiding(), tools=[HiddenOutputDetector()])
