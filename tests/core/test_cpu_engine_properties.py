"""Programs of random operations, views, writes and breaks: replay has the bits of eager, whatever the inputs."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, CPUSegmentEngine, eager_on_graph

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SIZE = 4
"""All tensors of a program are float32 [SIZE, SIZE], so that every operation takes every tensor."""

Step = Callable[[Tensor, Tensor, Tensor], Tensor]

PURE: dict[str, Step] = {
    "add": lambda a, b, i: a + b,
    "mm": lambda a, b, i: torch.mm(a, b).tanh(),
    "linear": lambda a, b, i: torch.nn.functional.linear(a, b).tanh(),
    "softmax": lambda a, b, i: a.softmax(-1),
    "where": lambda a, b, i: torch.where(a > b, a, b),
    "index": lambda a, b, i: a[i],
    "index_select": lambda a, b, i: b.index_select(1, i),
    "cat_split": lambda a, b, i: torch.cat([a, b], 1).split(SIZE, 1)[1],
    "sort": lambda a, b, i: a.sort(0).values,
    "cumsum": lambda a, b, i: (a / 8).cumsum(0),
    "norm": lambda a, b, i: torch.nn.functional.layer_norm(a, (SIZE,)),
    "bfloat16": lambda a, b, i: (a.bfloat16() * b.bfloat16()).float(),
    "contiguous": lambda a, b, i: a.t().contiguous(),
    "reshape": lambda a, b, i: a.t().reshape(2, 8).reshape(SIZE, SIZE),
    "fresh": lambda a, b, i: torch.zeros(SIZE, SIZE).index_copy_(0, i, a),
    "out": lambda a, b, i: torch.sub(a, b, out=torch.empty(SIZE, SIZE)),
}
VIEWS: dict[str, Step] = {
    "t": lambda a, b, i: a.t(),
    "view": lambda a, b, i: a.view(-1).view(SIZE, SIZE) if a.is_contiguous() else a,
    "expand": lambda a, b, i: a[:1].expand(SIZE, SIZE),
    "itself": lambda a, b, i: a,
}
WRITES: dict[str, Step] = {
    "copy_": lambda a, b, i: a.copy_(b.clone()),
    "tanh_": lambda a, b, i: a.tanh_(),
    "row": lambda a, b, i: assign(a, b),
    "index_put_": lambda a, b, i: a.index_put_((i,), b + 1),
    "clamp_": lambda a, b, i: a.clamp_(-1, 1),
}
BREAKS: dict[str, Step] = {
    "break_new": lambda a, b, i: eager_on_graph(lambda: a - b)(),
    "break_write": lambda a, b, i: eager_on_graph(lambda: a.sub_(0.5))(),
    "break_item": lambda a, b, i: eager_on_graph(lambda: b * float(a.nan_to_num().sum().tanh()))(),
    "break_nothing": lambda a, b, i: (eager_on_graph(lambda: None)(), a)[1],
}


def assign(a: Tensor, b: Tensor) -> Tensor:
    a[0] = b[1].clone()
    return a


STEPS = PURE | VIEWS | WRITES | BREAKS

programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)


def run(program: list[tuple[str, int, int]], inputs: list[Tensor]) -> list[Tensor]:
    """Run ``program``; each step appends its result, and takes its operands from the results so far."""
    *tensors, index = inputs
    for name, first, second in program:
        a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if name in WRITES or name == "break_write":
            a = a if 0 not in a.stride() else a.clone()
        tensors.append(STEPS[name](a, b, index))
    return tensors


def values(seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(SIZE, SIZE, generator=random),
        torch.randn(SIZE, SIZE, generator=random),
        torch.randperm(SIZE, generator=random),
    ]


def refill(inputs: list[Tensor], seed: int) -> None:
    for tensor, value in zip(inputs, values(seed), strict=True):
        tensor.copy_(value)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():
        a, b = a.view(torch.int32), b.view(torch.int32)
    return torch.equal(a, b)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@settings(UNHURRIED, max_examples=120)
@given(program=programs, seed=st.integers(1, 1000))
def test_a_program_replays_with_the_bits_of_eager(
    mode: Callable[[], AbstractContextManager[None]], program: list[tuple[str, int, int]], seed: int
) -> None:
    inputs = values(0)
    graph = BreakableCUDAGraph(CPUSegmentEngine())
    with mode():
        with BreakableCUDAGraphCapture(graph):
            replayed = run(program, inputs)
        refill(inputs, seed)
        graph.replay()
        eager = run(program, values(seed))
    assert all(map(same_bits, replayed, eager))


@settings(UNHURRIED, max_examples=60)
@given(program=programs, seed=st.integers(1, 1000))
def test_a_program_replays_alike_after_other_inputs(
    program: list[tuple[str, int, int]], seed: int
) -> None:
    inputs = values(0)
    graph = BreakableCUDAGraph(CPUSegmentEngine())
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        replayed = run(program, inputs)
    refill(inputs, seed)
    graph.replay()
    first = [tensor.clone() for tensor in replayed]
    refill(inputs, seed + 1)
    graph.replay()
    refill(inputs, seed)
    graph.replay()
    assert all(map(same_bits, replayed, first))


@settings(UNHURRIED, max_examples=60)
@given(program=programs)
def test_a_capture_changes_no_input_outside_of_breaks(program: list[tuple[str, int, int]]) -> None:
    program = [step for step in program if step[0] not in BREAKS]
    inputs = values(0)
    graph = BreakableCUDAGraph(CPUSegmentEngine())
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        run(program, inputs)
    assert all(map(same_bits, inputs, values(0)))


@settings(UNHURRIED, max_examples=60)
@given(program=programs)
def test_a_program_has_a_segment_more_than_breaks(program: list[tuple[str, int, int]]) -> None:
    inputs = values(0)
    graph = BreakableCUDAGraph(CPUSegmentEngine())
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        run(program, inputs)
    assert len(graph.breaks) == sum(name in BREAKS for name, _, _ in program)
    assert len(graph.segments) == len(graph.breaks) + 1
