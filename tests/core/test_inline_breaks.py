"""Captures in which breaks are part of the segment: nothing is broken, and their device work is recorded."""

from collections.abc import Callable
from contextlib import suppress
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
    break_graph,
    eager_on_graph,
)


class MistakeError(Exception):
    """What user code raises here."""


def capture(graph: BreakableCUDAGraph, work: Callable[[], Any]) -> Any:
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, inline_breaks=True):
        return work()


@eager_on_graph
def double(x: Tensor) -> Tensor:
    return x * 2


@eager_on_graph
def quadruple(x: Tensor) -> Tensor:
    return double(double(x))


@eager_on_graph(name="failing")
def fail() -> None:
    raise MistakeError


@pytest.mark.parametrize("work", [lambda x: double(x) + 1, quadruple], ids=["plain", "nested"])
def test_all_work_is_one_segment(graph: BreakableCUDAGraph, work: Callable[[Tensor], Any]) -> None:
    capture(graph, lambda: work(torch.ones(2)))
    assert (len(graph.segments), len(graph.breaks)) == (1, 0)


def test_an_empty_break_leaves_one_segment(graph: BreakableCUDAGraph) -> None:
    capture(graph, break_graph)
    assert (len(graph.segments), len(graph.breaks)) == (1, 0)


def test_device_work_of_breaks_is_replayed_on_new_values(graph: BreakableCUDAGraph) -> None:
    x = torch.ones(2)
    y = capture(graph, lambda: quadruple(x + 1) + 1)
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [21, 21]


def test_a_break_is_recorded_and_not_computed(graph: BreakableCUDAGraph) -> None:
    assert capture(graph, lambda: double(torch.ones(2))).isnan().all()


def test_python_of_breaks_does_not_run_at_replay(graph: BreakableCUDAGraph) -> None:
    runs: list[int] = []
    capture(graph, lambda: eager_on_graph(runs.append)(1))
    graph.replay()
    assert runs == [1]


def test_a_host_read_in_a_break_is_refused(graph: BreakableCUDAGraph) -> None:
    read = eager_on_graph(lambda x: x.item())
    with pytest.raises(HostReadError):
        capture(graph, lambda: read(torch.ones(1)))
    assert not graph.captured


def test_an_error_in_a_break_reaches_the_caller_and_names_the_break(
    graph: BreakableCUDAGraph,
) -> None:
    with pytest.raises(MistakeError) as caught:
        capture(graph, fail)
    (note,) = caught.value.__notes__
    assert "failing" in note
    assert not graph.captured


def test_an_error_in_a_break_may_not_be_swallowed(graph: BreakableCUDAGraph) -> None:
    def swallow() -> None:
        with suppress(MistakeError):
            fail()

    with pytest.raises(CaptureError, match="swallowed"):
        capture(graph, swallow)
    assert not graph.captured


def test_after_an_error_in_a_break_the_graph_can_be_captured(graph: BreakableCUDAGraph) -> None:
    with pytest.raises(MistakeError):
        capture(graph, fail)
    x = torch.ones(1)
    y = capture(graph, lambda: double(x))
    graph.replay()
    assert y.tolist() == [2]


def test_captures_with_and_without_breaks_share_an_engine(engine: CPUSegmentEngine) -> None:
    x = torch.ones(1)
    graphs = [BreakableCUDAGraph(engine) for _ in range(2)]
    results = []
    for graph, inline in zip(graphs, (True, False), strict=True):
        with torch.no_grad(), BreakableCUDAGraphCapture(graph, inline_breaks=inline):
            results.append(double(x) + 1)
    assert [len(graph.segments) for graph in graphs] == [1, 2]
    for graph in graphs:
        graph.replay()
    assert [y.tolist() for y in results] == [[3], [3]]
