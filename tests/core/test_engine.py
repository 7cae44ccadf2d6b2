"""Which engine records for which device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CPUSegmentEngine,
    CUDASegmentEngine,
    NestedCaptureError,
    eager_on_graph,
    engine_for,
)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")], ids=str)
def test_a_cpu_has_the_emulator(device: str | torch.device) -> None:
    assert isinstance(engine_for(device), CPUSegmentEngine)


def test_every_call_makes_an_engine_of_its_own() -> None:
    assert engine_for("cpu") is not engine_for("cpu")


@pytest.mark.parametrize("device", ["mps", "meta", "xpu:1"])
def test_other_devices_have_no_engine(device: str) -> None:
    with pytest.raises(
        ValueError, match=f"no segment engine for device '{device}'; use 'cuda' or 'cpu'"
    ):
        engine_for(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_a_gpu_is_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU: install a CUDA build of torch"):
        engine_for(device)


def test_the_cuda_engine_itself_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="or use device 'cpu' for the emulator"):
        CUDASegmentEngine()


MAKERS: dict[str, Callable[[], Any]] = {
    "CPUSegmentEngine": CPUSegmentEngine,
    "engine_for_cpu": lambda: engine_for("cpu"),
    "engine_for_cuda": lambda: engine_for("cuda"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_engine_is_not_made_in_a_segment(
    graph: BreakableCUDAGraph, make: Callable[[], Any]
) -> None:
    with (
        pytest.raises(NestedCaptureError, match="an engine cannot be made inside a capture"),
        BreakableCUDAGraphCapture(graph),
    ):
        make()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_engine_is_not_made_in_a_break(
    graph: BreakableCUDAGraph, make: Callable[[], Any]
) -> None:
    with (
        pytest.raises(NestedCaptureError, match="in a segment or in a break: make it before"),
        BreakableCUDAGraphCapture(graph),
    ):
        eager_on_graph(make)()


def test_an_engine_is_made_in_a_break_at_replay(graph: BreakableCUDAGraph) -> None:
    made: list[CPUSegmentEngine] = []
    replaying: list[bool] = []
    make = eager_on_graph(lambda: made.append(CPUSegmentEngine()) if replaying else None)
    with BreakableCUDAGraphCapture(graph):
        make()
    replaying.append(True)
    graph.replay()
    assert len(made) == 1


def test_a_runner_is_not_made_in_a_capture(
    graph: BreakableCUDAGraph,
    make_runner: Callable[..., Any],
    make_backend: Callable[..., Any],
    toy_model: type[Any],
) -> None:
    model, backend = toy_model(), make_backend()
    with pytest.raises(NestedCaptureError, match="engine"), BreakableCUDAGraphCapture(graph):
        make_runner(model=model, backend=backend, captured=False)
