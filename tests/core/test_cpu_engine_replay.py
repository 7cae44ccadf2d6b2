"""The CPU engine at replay: the same bits as eager on new inputs, at the same addresses, without running Python."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, CPUSegmentEngine, eager_on_graph

Capture = Callable[..., Any]
SameBits = Callable[[Any, Any], None]


@dataclass
class Inputs:
    """Static inputs of one dtype; ``refresh`` gives them other values at the same addresses."""

    x: Tensor  # [6, 8]
    y: Tensor  # [6, 8]
    w: Tensor  # [8, 8]
    b: Tensor  # [8]
    heads: Tensor  # [2, 4, 6, 8]
    kv: Tensor  # [2, 2, 6, 8]
    ids: Tensor  # [6], a permutation
    mask: Tensor  # [6, 8]

    @classmethod
    def make(cls, dtype: torch.dtype, seed: int) -> "Inputs":
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        return cls(
            x=normal(6, 8),
            y=normal(6, 8),
            w=normal(8, 8),
            b=normal(8),
            heads=normal(2, 4, 6, 8),
            kv=normal(2, 2, 6, 8),
            ids=torch.randperm(6, generator=random),
            mask=torch.randn(6, 8, generator=random) > 0,
        )

    def refresh(self, dtype: torch.dtype, seed: int) -> None:
        new = Inputs.make(dtype, seed)
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(new, field.name))


Operation = Callable[[Inputs], Any]

OPERATIONS: dict[str, Operation] = {
    # matrix products
    "mm": lambda i: torch.mm(i.x, i.w),
    "matmul_operator": lambda i: i.x @ i.w.t(),
    "mm_out": lambda i: torch.mm(i.x, i.w, out=torch.empty_like(i.x)),
    "addmm": lambda i: torch.addmm(i.b, i.x, i.w),
    "addmm_beta_alpha": lambda i: torch.addmm(i.y, i.x, i.w, beta=0.5, alpha=2),
    "addmm_out": lambda i: torch.addmm(i.b, i.x, i.w, out=torch.empty_like(i.x)),
    "linear": lambda i: F.linear(i.x, i.w),
    "linear_bias": lambda i: F.linear(i.x, i.w, i.b),
    "linear_of_three_dimensions": lambda i: F.linear(i.x.view(2, 3, 8), i.w, i.b),
    "bmm": lambda i: torch.bmm(i.heads[0], i.heads[1].transpose(1, 2)),
    "baddbmm": lambda i: torch.baddbmm(
        i.heads[0, :, :, :6], i.heads[0], i.heads[1].transpose(1, 2)
    ),
    "matmul_broadcast": lambda i: torch.matmul(i.heads, i.w),
    "mv": lambda i: torch.mv(i.x, i.b),
    "dot": lambda i: torch.dot(i.b, i.w[0]),
    "outer": lambda i: torch.outer(i.b, i.x[0]),
    "einsum": lambda i: torch.einsum("bnqh,bnsh->bnqs", i.heads, i.heads),
    "einsum_with_a_reduction": lambda i: torch.einsum("td,de->e", i.x, i.w),
    # normalisation and activation
    "layer_norm": lambda i: F.layer_norm(i.x, (8,), i.b, i.b),
    "rms_norm": lambda i: F.rms_norm(i.x, (8,), i.b, 1e-5),
    "rms_norm_by_hand": lambda i: (
        i.b * (i.x * torch.rsqrt(i.x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(i.x.dtype)
    ),
    "group_norm": lambda i: F.group_norm(i.x.view(2, 4, 6), 2),
    "batch_norm": lambda i: F.batch_norm(i.x, i.b, i.b.abs() + 1),
    "native_batch_norm": lambda i: torch.native_batch_norm(
        i.x, None, None, None, None, True, 0.1, 1e-5
    ),
    "normalize": lambda i: F.normalize(i.x),
    "softmax": lambda i: i.x.softmax(-1),
    "softmax_in_float": lambda i: F.softmax(i.x, dim=0, dtype=torch.float32),
    "log_softmax": lambda i: i.x.log_softmax(-1),
    "logsumexp": lambda i: i.x.logsumexp(0),
    "silu": lambda i: F.silu(i.x),
    "silu_in_place": lambda i: F.silu(i.x.clone(), inplace=True),
    "silu_mul": lambda i: F.silu(i.x[:, :4]) * i.x[:, 4:],
    "gelu": lambda i: F.gelu(i.x),
    "gelu_tanh": lambda i: F.gelu(i.x, approximate="tanh"),
    "relu": lambda i: F.relu(i.x),
    "leaky_relu": lambda i: F.leaky_relu(i.x),
    "sigmoid": lambda i: i.x.sigmoid(),
    "tanh": lambda i: i.x.tanh(),
    "softplus": lambda i: F.softplus(i.x),
    "hardswish": lambda i: F.hardswish(i.x),
    "glu": lambda i: F.glu(i.x),
    # attention
    "sdpa": lambda i: F.scaled_dot_product_attention(i.heads, i.heads, i.heads),
    "sdpa_causal": lambda i: F.scaled_dot_product_attention(
        i.heads, i.heads, i.heads, is_causal=True
    ),
    "sdpa_gqa": lambda i: F.scaled_dot_product_attention(
        i.heads, i.kv, i.kv, is_causal=True, enable_gqa=True
    ),
    "sdpa_mask": lambda i: F.scaled_dot_product_attention(
        i.heads, i.heads, i.heads, attn_mask=i.mask[:, :6] | torch.eye(6).bool()
    ),
    "sdpa_bias": lambda i: F.scaled_dot_product_attention(
        i.heads, i.heads, i.heads, attn_mask=i.y[:, :6].contiguous(), scale=0.3
    ),
    # choosing and moving elements
    "embedding": lambda i: F.embedding(i.ids, i.x),
    "index_select": lambda i: i.x.index_select(0, i.ids),
    "index_select_columns": lambda i: i.x.index_select(1, i.ids),
    "index": lambda i: i.x[i.ids],
    "index_pairs": lambda i: i.x[i.ids, i.ids.flip(0)],
    "index_copy_": lambda i: i.x.clone().index_copy_(0, i.ids, i.y),
    "index_copy_into_a_view": lambda i: torch.zeros(2, 6, 8, dtype=i.x.dtype)[1].index_copy_(
        0, i.ids, i.y
    ),
    "index_add_": lambda i: i.x.clone().index_add_(0, i.ids, i.y),
    "index_fill_": lambda i: i.x.clone().index_fill_(0, i.ids[:2], 3),
    "index_put_": lambda i: i.x.clone().index_put_((i.ids,), i.y),
    "index_put_accumulate": lambda i: i.x.clone().index_put_((i.ids // 2,), i.y, accumulate=True),
    "setitem": lambda i: set_item(i.x.clone(), i.ids, i.y),
    "setitem_slice": lambda i: set_item(i.x.clone(), slice(2, 4), i.y[:2]),
    "setitem_number": lambda i: set_item(i.x.clone(), 3, 0.5),
    "setitem_mask": lambda i: set_item(i.x.clone(), i.mask, -1.0),
    "gather": lambda i: i.x.gather(0, i.ids[:, None].expand(6, 8)),
    "scatter": lambda i: i.x.scatter(0, i.ids[:, None].expand(6, 8), i.y),
    "scatter_add": lambda i: i.x.scatter_add(0, i.ids[:, None].expand(6, 8), i.y),
    "scatter_reduce": lambda i: i.x.scatter_reduce(0, i.ids[:, None].expand(6, 8), i.y, "amax"),
    "take_along_dim": lambda i: i.x.take_along_dim(i.ids[:, None], 0),
    "cat": lambda i: torch.cat([i.x, i.y], dim=-1),
    "cat_out": lambda i: torch.cat([i.x, i.y], out=torch.empty(12, 8, dtype=i.x.dtype)),
    "stack": lambda i: torch.stack([i.x, i.y], dim=1),
    "split": lambda i: i.x.split([2, 4]),
    "split_of_a_result": lambda i: (i.x + 1).split(4, dim=-1),
    "chunk": lambda i: (i.x * 2).chunk(3),
    "unbind": lambda i: (i.x * 2).unbind(0),
    "where": lambda i: torch.where(i.mask, i.x, i.y),
    "where_number": lambda i: torch.where(i.mask, i.x, 0),
    "masked_fill": lambda i: i.x.masked_fill(i.mask, float("-inf")),
    "masked_scatter": lambda i: i.x.masked_scatter(i.mask, i.y),
    "flip": lambda i: i.x.flip(0, 1),
    "roll": lambda i: i.x.roll(2, 0),
    "tril": lambda i: i.x.tril(),
    "repeat": lambda i: i.x.repeat(2, 1),
    "repeat_interleave": lambda i: i.x.repeat_interleave(3, dim=1),
    "expand_then_add": lambda i: i.b.expand(6, 8) + i.x,
    "pad": lambda i: F.pad(i.x, (1, 2), value=9.0),
    "pixel_shuffle": lambda i: F.pixel_shuffle(i.x.view(1, 4, 3, 4), 2),
    "meshgrid": lambda i: torch.meshgrid(i.b, i.b, indexing="ij"),
    # order
    "sort": lambda i: i.x.sort(-1),
    "argsort": lambda i: i.x.argsort(dim=-1, stable=True),
    "topk": lambda i: i.x.topk(3),
    "max_of_dimension": lambda i: i.x.max(1),
    "argmax": lambda i: i.x.argmax(-1),
    "kthvalue": lambda i: i.x.kthvalue(2),
    "searchsorted": lambda i: torch.searchsorted(i.b.sort().values, i.x),
    # reductions
    "sum": lambda i: i.x.sum(),
    "sum_of_a_transpose": lambda i: i.x.t().sum(0),
    "mean": lambda i: i.x.mean(-1),
    "var": lambda i: i.x.var(-1),
    "std_mean": lambda i: torch.std_mean(i.x, -1),
    "amax": lambda i: i.x.amax(),
    "prod": lambda i: i.x.prod(-1),
    "norm": lambda i: i.x.norm(),
    "cumsum": lambda i: i.x.cumsum(0),
    "cumprod": lambda i: i.x.cumprod(-1),
    "any": lambda i: i.mask.any(1),
    # element by element
    "add": lambda i: i.x + i.y,
    "add_alpha": lambda i: torch.add(i.x, i.y, alpha=0.5),
    "mul_number": lambda i: i.x * 0.1,
    "number_minus": lambda i: 1 - i.x,
    "div": lambda i: i.x / i.y,
    "floor_divide": lambda i: i.x // 0.5,
    "remainder": lambda i: i.x % 0.3,
    "pow": lambda i: i.x.pow(2),
    "pow_of_a_number": lambda i: 2**i.x,
    "rsqrt": lambda i: (i.x.abs() + 1).rsqrt(),
    "exp": lambda i: i.x.exp(),
    "log": lambda i: i.x.abs().log(),
    "sin_cos": lambda i: (i.x.sin(), i.x.cos()),
    "clamp": lambda i: i.x.clamp(-0.5, 0.5),
    "clamp_": lambda i: i.x.clone().clamp_(min=0),
    "clamp_by_tensor": lambda i: i.x.clamp(min=i.y),
    "addcmul": lambda i: torch.addcmul(i.x, i.y, i.y, value=0.3),
    "lerp": lambda i: torch.lerp(i.x, i.y, 0.25),
    "compare": lambda i: i.x > i.y,
    "logical": lambda i: ~i.mask & (i.x > 0),
    "sign": lambda i: i.x.sign(),
    "round": lambda i: i.x.round(),
    "nan_to_num": lambda i: (i.x / 0).nan_to_num(),
    "isnan": lambda i: (i.x / i.x).isnan(),
    "minimum": lambda i: torch.minimum(i.x, i.y),
    "integer_arithmetic": lambda i: i.ids * 16 + i.ids % 4,
    # new tensors
    "arange": lambda i: torch.arange(6) + i.ids,
    "arange_as_positions": lambda i: torch.arange(6, dtype=i.x.dtype)[:, None] * i.x,
    "linspace": lambda i: torch.linspace(0, 1, 6) * i.x[:, 0],
    "full": lambda i: torch.full((6,), 3, dtype=i.x.dtype) + i.x[:, 0],
    "zeros_then_add_": lambda i: torch.zeros_like(i.x).add_(i.y),
    "empty_then_fill_": lambda i: torch.empty(3).fill_(2),
    "ones": lambda i: torch.ones(6, 8) * i.x,
    "eye": lambda i: torch.eye(8, dtype=i.x.dtype) + i.w,
    "scalar_tensor": lambda i: torch.scalar_tensor(2.0) * i.x,
    "causal_mask": lambda i: torch.ones(6, 6, dtype=torch.bool).tril() & i.mask[:, :6],
    # copies and conversions
    "clone": lambda i: i.x.clone(),
    "copy_": lambda i: torch.empty(6, 8).copy_(i.x),
    "copy_into_a_slice": lambda i: torch.zeros(6, 16)[:, 8:].copy_(i.x),
    "contiguous": lambda i: i.x.t().contiguous(),
    "reshape_of_a_transpose": lambda i: i.x.t().reshape(-1),
    "to_double": lambda i: i.x.to(torch.float64),
    "to_int": lambda i: (i.x * 10).to(torch.int32),
    "to_bool": lambda i: (i.x * 3).round().bool(),
    "to_bfloat16": lambda i: i.x.bfloat16(),
    "to_float8": lambda i: i.x.to(torch.float8_e4m3fn),
    "promotion": lambda i: i.x * i.ids[:, None],
    "byte_view": lambda i: i.x.clone().view(torch.uint8),
    # several tensors at once
    "foreach_add": lambda i: torch._foreach_add([i.x, i.y], [i.y, i.x]),
    "foreach_mul_": lambda i: foreach([i.x.clone(), i.y.clone()], torch._foreach_mul_, 3),
    "foreach_copy_": lambda i: foreach(
        [torch.empty_like(i.x), torch.empty_like(i.y)], torch._foreach_copy_, [i.x, i.y]
    ),
}

FLOAT32_ONLY: dict[str, Operation] = {
    "conv1d": lambda i: F.conv1d(i.x[None], i.w[:, :6, None]),
    "causal_conv1d": lambda i: F.conv1d(F.pad(i.x.t(), (2, 0)), i.w[:, None, :3], groups=8),
    "conv2d": lambda i: F.conv2d(i.heads, i.heads[:, :, :3, :3]),
    "max_pool": lambda i: F.max_pool1d(i.x, 2),
    "avg_pool": lambda i: F.avg_pool1d(i.x, 2),
    "interpolate": lambda i: F.interpolate(i.x[None], scale_factor=2, mode="linear"),
    "complex_rotation": lambda i: torch.view_as_real(
        torch.view_as_complex(i.x.view(6, 4, 2)) * torch.view_as_complex(i.y.view(6, 4, 2))
    ),
    "polar": lambda i: torch.polar(torch.ones(6, 8), i.x),
    "conjugate": lambda i: torch.complex(i.x, i.y).conj() * 2,
    "fft": lambda i: torch.fft.rfft(i.x),
    "cdist": lambda i: torch.cdist(i.x, i.y),
    "cosine_similarity": lambda i: F.cosine_similarity(i.x, i.y),
    "cross_entropy": lambda i: F.cross_entropy(i.x, i.ids),
    "quantised_by_hand": lambda i: (i.x / i.x.abs().amax() * 127).round().to(torch.int8),
    "triangular_solve": lambda i: torch.linalg.solve_triangular(
        i.w.triu() + 8 * torch.eye(8), i.x.t(), upper=True
    ),
    "lstm_cell": lambda i: torch.lstm_cell(
        i.x, (i.y, i.y), i.w.repeat(4, 1), i.w.repeat(4, 1), i.b.repeat(4), i.b.repeat(4)
    ),
    "multi_head_projection": lambda i: F.linear(
        F.linear(i.x, i.w).view(6, 2, 4).transpose(0, 1).reshape(6, 8), i.w
    ),
    "lstm": lambda i: LSTM(i.x)[0],
    "grouped_mm": lambda i: F.grouped_mm(
        i.heads.view(2, 24, 8)[0, :16].repeat(1, 2).bfloat16(),
        i.w.repeat(4, 2).view(2, 16, 16).bfloat16(),
        offs=torch.cat([8 + i.ids[:1], torch.full((1,), 16)]).int(),
    ),
    "autocast": lambda i: under_autocast(i.x, i.w),
}


LSTM = torch.nn.LSTM(8, 8)


def set_item(x: Tensor, key: Any, value: Any) -> Tensor:
    x[key] = value
    return x


def foreach(tensors: list[Tensor], fn: Callable[..., Any], argument: Any) -> list[Tensor]:
    fn(tensors, argument)
    return tensors


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ w


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def replay_on_new_inputs(
    graph: BreakableCUDAGraph,
    operation: Operation,
    dtype: torch.dtype,
    mode: Callable[[], AbstractContextManager[Any]],
) -> tuple[Any, Any]:
    """Capture on one set of inputs, replay on another; return what was replayed, and eager's result."""
    inputs = Inputs.make(dtype, seed=1)
    with mode():
        with BreakableCUDAGraphCapture(graph):
            result = operation(inputs)
        inputs.refresh(dtype, seed=2)
        graph.replay()
        return result, operation(inputs)


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        pytest.param(torch.float32, torch.no_grad, id="float32-no_grad"),
        pytest.param(torch.float32, torch.inference_mode, id="float32-inference_mode"),
        pytest.param(torch.bfloat16, torch.inference_mode, id="bfloat16-inference_mode"),
        pytest.param(torch.float16, torch.inference_mode, id="float16-inference_mode"),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_replay_has_the_bits_of_eager(
    graph: BreakableCUDAGraph,
    assert_same_bits: SameBits,
    operation: Operation,
    dtype: torch.dtype,
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    replayed, eager = replay_on_new_inputs(graph, operation, dtype, mode)
    assert_same_bits(replayed, eager)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("operation", FLOAT32_ONLY.values(), ids=FLOAT32_ONLY)
def test_replay_has_the_bits_of_eager_in_float32(
    graph: BreakableCUDAGraph,
    assert_same_bits: SameBits,
    operation: Operation,
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    replayed, eager = replay_on_new_inputs(graph, operation, torch.float32, mode)
    assert_same_bits(replayed, eager)


def test_a_changed_bit_is_seen(assert_same_bits: SameBits) -> None:
    with pytest.raises(AssertionError):
        assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_a_capture_under_inference_mode_replays_outside_of_it(graph: BreakableCUDAGraph) -> None:
    x = torch.ones(3)
    with torch.inference_mode(), BreakableCUDAGraphCapture(graph):
        y = x * 2
        y += 1
    graph.replay()
    assert y.tolist() == [3, 3, 3]


def test_a_capture_outside_of_inference_mode_replays_under_it(graph: BreakableCUDAGraph) -> None:
    x = torch.ones(3)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        y = x * 2
    with torch.inference_mode():
        graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_parameters_that_require_grad_are_captured_without_it(graph: BreakableCUDAGraph) -> None:
    weight = torch.nn.Parameter(torch.eye(3))
    x = torch.ones(2, 3)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        y = F.linear(x, weight)
        weight.mul_(2)
    graph.replay()
    assert torch.equal(y, x)
    assert torch.equal(weight, 2 * torch.eye(3))


# Python


def test_python_does_not_run_at_replay(capture: Capture) -> None:
    runs: list[int] = []
    graph, _ = capture(lambda x: (runs.append(1), x + 1)[1], torch.zeros(2))
    graph.replay()
    graph.replay()
    assert runs == [1]


def test_python_branches_are_taken_once(capture: Capture) -> None:
    switch = {"on": True}
    graph, y = capture(lambda x: x + 1 if switch["on"] else x - 1, torch.zeros(2))
    switch["on"] = False
    graph.replay()
    assert y.tolist() == [1, 1]


def test_python_numbers_are_frozen_at_capture(capture: Capture) -> None:
    state = {"scale": 2}
    graph, y = capture(lambda x: x * state["scale"], torch.ones(2))
    state["scale"] = 5
    graph.replay()
    assert y.tolist() == [2, 2]


def test_a_list_of_operands_is_frozen_at_capture(capture: Capture) -> None:
    parts = [torch.ones(1), torch.zeros(1)]
    graph, y = capture(lambda: torch.cat(parts))
    parts.reverse()
    graph.replay()
    assert y.tolist() == [1, 0]


# Addresses


def test_a_result_keeps_its_address_over_replays(capture: Capture) -> None:
    x = torch.zeros(3)
    graph, y = capture(lambda: x + 1)
    address = y.data_ptr()
    graph.replay()
    x.fill_(4)
    graph.replay()
    assert y.data_ptr() == address
    assert y.tolist() == [5, 5, 5]


def test_a_view_of_a_result_sees_every_replay(capture: Capture) -> None:
    x = torch.zeros(2, 3)
    graph, (y, row) = capture(lambda: ((y := x + 1), y[1]))
    graph.replay()
    assert row.tolist() == [1, 1, 1]
    x.fill_(4)
    graph.replay()
    assert row.tolist() == [5, 5, 5]
    assert row.data_ptr() == y[1].data_ptr()


def test_a_write_through_a_view_is_seen_by_later_operations(capture: Capture) -> None:
    def run(x: Tensor) -> Tensor:
        y = x * 1
        y[0].fill_(9)
        return y.sum(1)

    graph, total = capture(run, torch.ones(2, 3))
    graph.replay()
    assert total.tolist() == [27, 3]


def test_segments_share_their_tensors_by_address(capture: Capture) -> None:
    between = eager_on_graph(lambda y: y.mul_(10))

    def run(x: Tensor) -> Tensor:
        y = x + 1
        between(y)
        return y + 1

    graph, result = capture(run, torch.ones(2))
    graph.replay()
    assert result.tolist() == [21, 21]


def test_intermediate_tensors_live_as_long_as_the_segment(capture: Capture) -> None:
    graph, y = capture(lambda x: (x + 1) * 2 - 3, torch.ones(1000))
    gc.collect()
    noise = [torch.full((1000,), float("nan")) for _ in range(50)]
    graph.replay()
    assert len(noise) == 50
    assert torch.equal(y, torch.ones(1000))


def test_an_input_is_held_by_the_segment(capture: Capture) -> None:
    x = torch.ones(3)
    memory = StorageWeakRef(x.untyped_storage())
    graph, _ = capture(lambda x: x + 1, x)
    del x
    gc.collect()
    assert not memory.expired()
    del graph
    gc.collect()
    assert memory.expired()


def test_a_replay_does_the_writes_of_its_segments_in_order(capture: Capture) -> None:
    def run(x: Tensor) -> None:
        x.add_(1)
        x.mul_(2)
        x.add_(1)

    x = torch.zeros(2)
    graph, _ = capture(run, x)
    graph.replay()
    assert x.tolist() == [3, 3]


# Memory


@pytest.fixture
def kept(engine: CPUSegmentEngine) -> Iterator[CPUSegmentEngine]:
    gc.collect()
    assert engine.memory_bytes() == 0
    return engine


def test_memory_is_that_of_the_results(kept: CPUSegmentEngine, capture: Capture) -> None:
    graph, _ = capture(lambda x: (x + 1, x * 2), torch.zeros(100))
    assert graph.captured
    assert kept.memory_bytes() == 2 * 100 * 4


def test_memory_counts_what_was_allocated_and_then_written(
    kept: CPUSegmentEngine, capture: Capture
) -> None:
    graph, _ = capture(lambda x: torch.add(x, 1, out=torch.empty(100)), torch.zeros(100))
    assert graph.captured
    assert kept.memory_bytes() == 100 * 4


def test_memory_does_not_count_views_and_writes_into_inputs(
    kept: CPUSegmentEngine, capture: Capture
) -> None:
    graph, _ = capture(lambda x: x.view(10, 10).t()[1].add_(1), torch.zeros(100))
    assert graph.captured
    assert kept.memory_bytes() == 0


def test_memory_of_all_live_graphs_is_counted(kept: CPUSegmentEngine, capture: Capture) -> None:
    graphs = [capture(lambda x: x + 1, torch.zeros(100))[0] for _ in range(3)]
    assert len(graphs) == 3
    assert kept.memory_bytes() == 3 * 100 * 4


def test_memory_of_a_dropped_graph_is_not_counted(kept: CPUSegmentEngine, capture: Capture) -> None:
    graph, _ = capture(lambda x: x + 1, torch.zeros(100))
    graph.reset()
    gc.collect()
    assert kept.memory_bytes() == 0


def test_memory_of_a_failed_capture_is_not_counted(
    kept: CPUSegmentEngine, capture: Capture
) -> None:
    def run(x: Tensor) -> None:
        eager_on_graph(lambda: None)(x + 1)

    with pytest.raises(TypeError):
        capture(run, torch.zeros(100))
    gc.collect()
    assert kept.memory_bytes() == 0


def test_results_of_a_replay_are_the_tensors_of_the_capture(capture: Capture) -> None:
    graph, result = capture(lambda x: x.sort(), torch.tensor([2.0, 1.0]))
    leaves = pytree.tree_leaves(result)
    graph.replay()
    assert [leaf.tolist() for leaf in leaves] == [[1, 2], [1, 0]]
