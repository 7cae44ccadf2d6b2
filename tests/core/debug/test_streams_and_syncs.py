"""The guards of streams and synchronisation: nothing to do on a CPU, the logic on a pretended GPU, the rest on one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CUDASegmentEngine,
    StreamError,
    SynchronisationError,
    eager_on_graph,
)
from bcg_core.debug import Site, StreamGuard, SyncGuard, Tool, WatchedEngine, synchronisation

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SITE = Site(index=3, name="attention")
GUARDS = pytest.mark.parametrize("guard", [StreamGuard, SyncGuard], ids=lambda g: g.__name__)


def nothing() -> str:
    return "result"


@GUARDS
def test_a_break_on_a_cpu_is_left_as_it_is(guard: type[Tool]) -> None:
    assert guard().around_break(CPU, SITE, nothing) is nothing


# A pretended GPU


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the last of this list the current stream."""
    current = ["main"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    return current


def test_a_break_that_keeps_its_stream_is_accepted(streams: list[str]) -> None:
    assert StreamGuard().around_break(CUDA, SITE, nothing)() == "result"


def test_a_break_that_changes_the_stream_is_refused_and_the_stream_restored(
    streams: list[str],
) -> None:
    watched = StreamGuard().around_break(CUDA, SITE, lambda: streams.append("other"))
    with pytest.raises(StreamError, match=r"break 3 \(attention\) left other current, where main"):
        watched()
    assert streams[-1] == "main"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the synchronisation debug modes that were set, the current one last."""
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_synchronisation_is_forbidden_inside_of_a_break_alone(modes: list[Any]) -> None:
    seen: list[Any] = []
    SyncGuard().around_break(CUDA, SITE, lambda: seen.append(modes[-1]))()
    assert (seen, modes[-1]) == (["error"], 0)


def test_synchronisation_can_be_allowed_again_for_a_while(modes: list[Any]) -> None:
    with synchronisation("error"):
        with synchronisation("default"):
            assert modes[-1] == "default"
        assert modes[-1] == "error"


def test_what_torch_says_becomes_an_error_that_names_the_break(modes: list[Any]) -> None:
    def wait() -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(SynchronisationError, match=r"break 3 \(attention\)"):
        SyncGuard().around_break(CUDA, SITE, wait)()
    assert modes[-1] == 0


def test_another_error_of_a_break_stays_what_it_is(modes: list[Any]) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") as raised:
        SyncGuard().around_break(CUDA, SITE, fail)()
    assert type(raised.value) is RuntimeError


@pytest.mark.parametrize(("declared", "expected"), [(True, 0), (False, "error")], ids=str)
def test_a_backend_that_declares_a_host_plan_may_wait(
    modes: list[Any], declared: bool, expected: Any
) -> None:
    guard, seen = SyncGuard(), []
    capabilities = SimpleNamespace(needs_host_plan=declared)
    runner: Any = SimpleNamespace(backend=SimpleNamespace(capabilities=capabilities))
    guard.attach(runner)
    guard.around_break(CUDA, SITE, lambda: seen.append(modes[-1]))()
    assert seen == [expected]


# A real one

on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class Switch:
    """Run ``work`` in a break, from ``on`` being set to True on: at replay, not at capture."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.on = False

    @eager_on_graph(name="switch")
    def run(self) -> None:
        if self.on:
            self.work()


@contextmanager
def captured(work: Callable[[], Any], tool: Tool) -> Iterator[BreakableCUDAGraph]:
    """Capture a break that runs ``work`` at replay, watched by ``tool``."""
    switch = Switch(work)
    graph = BreakableCUDAGraph(WatchedEngine(CUDASegmentEngine(), [tool]))
    x = torch.ones(4, device="cuda")
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        x.add_(1)
        switch.run()
        x.add_(1)
    switch.on = True
    yield graph
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("joins", "accepted"),
    [
        pytest.param(True, True, marks=on_gpu, id="joined"),
        pytest.param(False, False, marks=on_gpu, id="left"),
    ],
)
def test_work_on_a_side_stream_has_to_be_joined(joins: bool, accepted: bool) -> None:
    side, y = torch.cuda.Stream(), torch.ones(4, device="cuda")

    def work() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y.mul_(2)
        if joins:
            main.wait_stream(side)

    with captured(work, StreamGuard()) as graph:
        if accepted:
            graph.replay()
        else:
            with pytest.raises(StreamError, match=r"queued aten::mul_\.Tensor"):
                graph.replay()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_break_that_waits_for_the_gpu_is_refused() -> None:
    y = torch.ones(4, device="cuda")
    with (
        captured(y.sum().item, SyncGuard()) as graph,
        pytest.raises(SynchronisationError, match="switch"),
    ):
        graph.replay()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_break_that_only_queues_work_is_accepted() -> None:
    y = torch.ones(4, device="cuda")
    with captured(lambda: y.mul_(2), SyncGuard()) as graph:
        graph.replay()
