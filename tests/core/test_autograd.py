"""Captures with autograd on: what is recorded is what eager computes, gradients included."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, eager_on_graph, engine_for

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]


class Layer(nn.Module):
    """A layer whose parameters require gradients, with a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = self.inner(x_TD)
        return F.linear(y_TD.mul_(2), self.inner[0].weight)


def with_a_break(layer: Layer, x_TD: Tensor) -> Tensor:
    return layer(eager_on_graph(lambda y_TD: y_TD * 3)(layer(x_TD)))


def gradient(layer: Layer, x_TD: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(layer(x_TD).sum(), layer.inner[0].weight)
    return grad


RUNS: dict[str, Callable[[Layer, Tensor], Tensor]] = {
    "forward": lambda layer, x_TD: layer(x_TD),
    "forward_with_a_break": with_a_break,
    "gradient": gradient,
}


def captured(
    run: Callable[[Layer, Tensor], Tensor], device: str
) -> tuple[BreakableCUDAGraph, Layer, Tensor, Tensor]:
    torch.manual_seed(0)
    engine = engine_for(device)
    layer, x_TD = Layer().to(device), torch.randn(3, 8, device=device)
    with engine.warming_up():
        run(layer, x_TD)
    graph = BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        y = run(layer, x_TD)
    return graph, layer, x_TD, y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_replay_has_the_bits_of_eager_with_autograd_on(
    run: Callable[[Layer, Tensor], Tensor], device: str
) -> None:
    graph, layer, x_TD, y = captured(run, device)
    x_TD.copy_(torch.randn(3, 8))
    graph.replay()
    assert torch.equal(y, run(layer, x_TD))


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_are_updated_in_place_between_replays(device: str) -> None:
    graph, layer, x_TD, y = captured(RUNS["gradient"], device)
    with torch.no_grad():
        layer.inner[0].weight.mul_(0.5)
    graph.replay()
    assert torch.equal(y, gradient(layer, x_TD))


@pytest.mark.parametrize("device", DEVICES)
def test_a_result_belongs_to_the_history_of_its_capture(device: str) -> None:
    _, _, _, y = captured(RUNS["forward"], device)
    assert y.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_a_write_into_a_leaf_that_requires_grad_is_autograds_error(device: str) -> None:
    weight = nn.Parameter(torch.ones(3, device=device))
    graph = BreakableCUDAGraph(engine_for(device))
    with (
        pytest.raises(RuntimeError, match="a leaf Variable that requires grad"),
        BreakableCUDAGraphCapture(graph),
    ):
        weight.add_(1)
