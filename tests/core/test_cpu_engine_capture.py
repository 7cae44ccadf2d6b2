"""The CPU engine at capture: nothing is computed, what is read is poison, and what CUDA refuses is refused."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CaptureError,
    HostReadError,
    eager_on_graph,
)
from bcg_harness.testing.capture_rules import HOST_READS

Capture = Callable[..., Any]

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
COMPLEX = [torch.complex64, torch.complex128]


def floats(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


# What new tensors hold


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_made_in_a_segment_are_nan_at_capture(capture: Capture, dtype: torch.dtype) -> None:
    _, made = capture(lambda: torch.zeros(2, 3, dtype=dtype))
    assert made.float().isnan().all()


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers_made_in_a_segment_are_nan_at_capture(
    capture: Capture, dtype: torch.dtype
) -> None:
    _, made = capture(lambda: torch.zeros(2, 3, dtype=dtype))
    assert made.to(torch.complex64).isnan().all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_made_in_a_segment_are_the_largest_at_capture(
    capture: Capture, dtype: torch.dtype
) -> None:
    _, made = capture(lambda: torch.zeros(2, 3, dtype=dtype))
    assert set(made.flatten().tolist()) == {torch.iinfo(dtype).max}


def test_booleans_made_in_a_segment_are_true_at_capture(capture: Capture) -> None:
    _, made = capture(lambda: torch.zeros(2, 3, dtype=torch.bool))
    assert made.all()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty(2, 3),
        lambda x: torch.empty_like(x),
        lambda x: torch.empty_strided((2, 3), (3, 1)),
        lambda x: x.new_empty(2, 3),
        lambda x: x.new_empty_strided((2, 3), (3, 1)),
        lambda x: torch.empty_permuted((2, 3), (1, 0)),
    ],
    ids=[
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
    ],
)
def test_allocated_memory_is_nan_at_capture(capture: Capture, make: Callable[..., Tensor]) -> None:
    _, made = capture(make, floats(2, 3))
    assert made.isnan().all()


def test_allocated_memory_is_not_touched_at_replay(capture: Capture) -> None:
    graph, made = capture(lambda: torch.empty(3))
    made.fill_(7)
    graph.replay()
    assert made.tolist() == [7, 7, 7]


def test_a_break_sees_poison_at_capture(capture: Capture) -> None:
    seen: list[Tensor] = []
    look = eager_on_graph(lambda value: seen.append(value.clone()))
    capture(lambda x: look(x + 1), floats(2, 3))
    assert seen[0].isnan().all()


def test_poison_spreads_to_what_a_break_computes_at_capture(capture: Capture) -> None:
    double = eager_on_graph(lambda value: value * 2)
    _, result = capture(lambda x: double(x + 1), floats(2, 3))
    assert result.isnan().all()


def test_inputs_are_unchanged_by_a_capture(capture: Capture) -> None:
    x = floats(2, 3)
    capture(lambda: (x + 1).sum())
    assert torch.equal(x, floats(2, 3))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)], ids=str)
def test_shapes_without_or_with_one_element_are_recorded(
    capture: Capture, shape: tuple[int, ...]
) -> None:
    graph, result = capture(lambda x: x + 1, torch.zeros(shape))
    graph.replay()
    assert torch.equal(result, torch.ones(shape))


def test_the_random_generator_does_not_advance_at_capture(capture: Capture) -> None:
    before = torch.get_rng_state()
    capture(lambda: torch.nn.functional.dropout(torch.rand(8), 0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_result_has_the_strides_that_eager_gives_it(capture: Capture) -> None:
    x = floats(2, 3, 4).permute(2, 0, 1)
    _, result = capture(lambda: x * 2)
    assert result.stride() == (x * 2).stride()


# Writes

WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
    "fill_": lambda x, y: x.fill_(7),
    "zero_": lambda x, y: x.zero_(),
    "mul_by_number": lambda x, y: x.mul_(2),
    "clamp_": lambda x, y: x.clamp_(2, 4),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.full((1,), 2), y[:1] * 2),
    "index_fill_": lambda x, y: x.index_fill_(1, torch.arange(2), -1),
    "index_add_": lambda x, y: x.index_add_(0, torch.zeros(3, dtype=torch.long), y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 3, 0),
    "scatter_": lambda x, y: x.scatter_(0, torch.zeros(1, 3, dtype=torch.long), y),
    "setitem_row": lambda x, y: x.__setitem__(0, y[1]),
    "setitem_number": lambda x, y: x.__setitem__((slice(None), 1), 5.0),
    "setitem_integer_index": lambda x, y: x.__setitem__(torch.zeros(1, dtype=torch.long), y[1:2]),
    "setitem_mask_number": lambda x, y: x.__setitem__(x > 3, 0.0),
    "through_a_view": lambda x, y: x.t()[0].mul_(3),
    "mm_out": lambda x, y: torch.mm(y, y.t(), out=x),
    "add_out_of_a_view": lambda x, y: torch.add(y[0], 1, out=x[0]),
    "foreach": lambda x, y: torch._foreach_add_([x[0], x[1]], [y[1], y[0]]),
    "swap_of_halves": lambda x, y: x.copy_(x.flip(0)),
}


def squares() -> tuple[Tensor, Tensor]:
    return floats(3, 3), floats(3, 3).flip(1) / 2


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_do_not_happen_at_capture(
    capture: Capture, write: Callable[[Tensor, Tensor], Any]
) -> None:
    x, y = squares()
    capture(write, x, y)
    assert torch.equal(x, squares()[0])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_happen_at_replay(capture: Capture, write: Callable[[Tensor, Tensor], Any]) -> None:
    x, y = squares()
    expected = x.clone()
    write(expected, y)
    graph, _ = capture(write, x, y)
    graph.replay()
    assert torch.equal(x, expected)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_happen_again_at_each_replay(
    capture: Capture, write: Callable[[Tensor, Tensor], Any]
) -> None:
    x, y = squares()
    expected = x.clone()
    write(expected, y)
    write(expected, y)
    graph, _ = capture(write, x, y)
    graph.replay()
    graph.replay()
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    "write",
    [lambda x: x.add_(1), lambda x: torch.add(x, 1, out=x), lambda x: x.copy_(x + 1)],
    ids=["add_", "out", "copy_"],
)
def test_a_write_returns_the_tensor_it_writes(
    capture: Capture, write: Callable[[Tensor], Tensor]
) -> None:
    x = floats(2, 3)
    _, result = capture(write, x)
    assert result is x


def test_outs_of_an_operation_with_two_results_are_returned_in_order(capture: Capture) -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
    graph, result = capture(lambda: torch.sort(x, out=(values, indices)))
    graph.replay()
    assert result.values is values
    assert result.indices is indices
    assert values.tolist() == [1, 2, 3]
    assert indices.tolist() == [1, 2, 0]


# Views

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:],
    "select": lambda x: x[1],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x[None].expand(2, 3, 4),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x[:1].squeeze(),
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "unbind": lambda x: x.unbind()[2],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(3, 2, 2)),
    "view_dtype": lambda x: x.view(torch.int32),
    "detach": lambda x: x.detach(),
    "iteration": lambda x: next(iter(x)),
    "movedim": lambda x: x.movedim(0, 1),
    "ellipsis": lambda x: x[..., None, 0],
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_shares_its_memory_at_capture(
    capture: Capture, make: Callable[[Tensor], Tensor]
) -> None:
    x = floats(3, 4)
    _, view = capture(make, x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_has_the_geometry_of_eager(
    capture: Capture, make: Callable[[Tensor], Tensor]
) -> None:
    x = floats(3, 4)
    _, view = capture(make, x)
    eager = make(x)
    assert (view.shape, view.stride(), view.storage_offset()) == (
        eager.shape,
        eager.stride(),
        eager.storage_offset(),
    )


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_a_view_is_not_recorded(capture: Capture, make: Callable[[Tensor], Tensor]) -> None:
    graph, _ = capture(make, floats(3, 4))
    assert graph.segments[0].operations == ()


VIEW_OR_COPY: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "reshape_contiguous": (lambda x: x.reshape(-1), True),
    "reshape_transposed": (lambda x: x.t().reshape(-1), False),
    "flatten_contiguous": (lambda x: x.flatten(), True),
    "flatten_transposed": (lambda x: x.t().flatten(), False),
    "contiguous": (lambda x: x.contiguous(), True),
    "contiguous_of_transposed": (lambda x: x.t().contiguous(), False),
    "to_same_dtype": (lambda x: x.to(torch.float32), True),
    "to_other_dtype": (lambda x: x.to(torch.bfloat16), False),
    "to_copy": (lambda x: x.to(torch.float32, copy=True), False),
    "to_same_device": (lambda x: x.to("cpu"), True),
    "float": (lambda x: x.float(), True),
    "half": (lambda x: x.half(), False),
    "type_as_same": (lambda x: x.type_as(x), True),
    "type_as_other": (lambda x: x.type_as(x.double()), False),
    "ravel": (lambda x: x.ravel(), True),
    "reshape_as": (lambda x: x.reshape_as(x.view(4, 3)), True),
    "resolve_conj": (lambda x: x.resolve_conj(), True),
    "resolve_conj_of_conj": (lambda x: torch.complex(x, x).conj().resolve_conj(), False),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), True),
    "clone": (lambda x: x.clone(), False),
}


@pytest.mark.parametrize(("make", "shares"), VIEW_OR_COPY.values(), ids=VIEW_OR_COPY)
def test_an_operation_that_may_copy_shares_memory_exactly_where_eager_does(
    capture: Capture, make: Callable[[Tensor], Tensor], shares: bool
) -> None:
    x = floats(3, 4)
    _, result = capture(make, x)
    same = result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert same == shares


@pytest.mark.parametrize(("make", "shares"), VIEW_OR_COPY.values(), ids=VIEW_OR_COPY)
def test_an_operation_that_may_copy_is_right_on_new_inputs(
    capture: Capture, make: Callable[[Tensor], Tensor], shares: bool
) -> None:
    x = floats(3, 4)
    graph, result = capture(make, x)
    x.copy_(-floats(3, 4))
    graph.replay()
    assert torch.equal(result, make(x))


# Host reads

READS_BY_NUMPY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "asarray": lambda x, i: np.asarray(x),
    "asarray_with_dtype": lambda x, i: np.asarray(x, dtype=np.float64),
    "from_dlpack": lambda x, i: np.from_dlpack(x),
}
READS = READS_BY_NUMPY | HOST_READS


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_host_read_is_refused(capture: Capture, read: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(HostReadError, match="reads a device value on the host inside a segment"):
        capture(read, floats(3, 4), torch.tensor([2, 0, 1]))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_host_read_that_is_swallowed_makes_the_capture_fail(
    graph: BreakableCUDAGraph, read: Callable[[Tensor, Tensor], Any]
) -> None:
    x, i = floats(3, 4), torch.tensor([2, 0, 1])
    capturing = BreakableCUDAGraphCapture(graph)
    with torch.no_grad(), pytest.raises(CaptureError, match="became invalid") as caught, capturing:
        swallow(read, x, i)
    assert isinstance(caught.value.__cause__, HostReadError)
    assert not graph.captured


def swallow(fn: Callable[..., Any], *args: Any) -> None:
    try:
        fn(*args)
    except RuntimeError:
        return
    pytest.fail("nothing was refused")


@pytest.mark.parametrize(
    "name", ["item", "if", "nonzero", "index_by_mask", "equal", "tolist", "asarray", "cpu", "print"]
)
def test_a_host_read_inside_a_break_is_allowed(capture: Capture, name: str) -> None:
    read = eager_on_graph(lambda x, i: (READS[name](x, i), None)[1])
    graph, _ = capture(read, floats(3, 4), torch.tensor([2, 0, 1]))
    graph.replay()
    assert len(graph.breaks) == 1


def test_a_host_read_says_what_to_do(capture: Capture) -> None:
    with pytest.raises(HostReadError, match=r"Move it into a break \(eager_on_graph\)"):
        capture(lambda x: x.sum().item(), floats(2))


def test_a_host_read_after_a_break_is_refused(capture: Capture) -> None:
    nothing = eager_on_graph(lambda: None)
    with pytest.raises(HostReadError):
        capture(lambda x: (nothing(), x.sum().item()), floats(2))


def test_host_reads_are_free_again_after_a_capture(capture: Capture) -> None:
    capture(lambda x: x + 1, floats(2))
    assert floats(2).tolist() == [1, 2]
    assert floats(2).sum().item() == 3


# Other refusals

HOST_DATA: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: torch.tensor([1.0, 2.0]),
    "tensor_of_an_array": lambda x: torch.tensor(np.ones(2)),
    "as_tensor": lambda x: torch.as_tensor([1, 2]),
    "as_tensor_of_an_array": lambda x: torch.as_tensor(np.ones(2)),
    "asarray": lambda x: torch.asarray([1, 2]),
    "from_numpy": lambda x: torch.from_numpy(np.ones(2)),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "constructor": lambda x: torch.Tensor([1, 2]),
    "index_by_a_list": lambda x: x[[0, 1]],
}


@pytest.mark.parametrize("make", HOST_DATA.values(), ids=HOST_DATA)
def test_host_data_made_a_tensor_in_a_segment_is_refused(
    capture: Capture, make: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(CaptureError, match="frozen at capture"):
        capture(make, floats(3, 4))


@pytest.mark.parametrize("number", [3.0, 3, True], ids=str)
def test_a_number_made_a_tensor_in_a_segment_is_a_constant(capture: Capture, number: Any) -> None:
    def run(x: Tensor) -> Tensor:
        return x * torch.tensor(number) + 1

    x = floats(3, 4)
    graph, result = capture(run, x)
    x.add_(2)
    graph.replay()
    assert torch.equal(result, run(x))


MEMORY: dict[str, Callable[[Tensor], Any]] = {
    "resize_": lambda x: x.resize_(2, 2),
    "resize_as_": lambda x: x.resize_as_(x[:1]),
    "set_": lambda x: x.set_(x.clone()),
    "deepcopy": lambda x: copy.deepcopy(x),
}


@pytest.mark.parametrize("change", MEMORY.values(), ids=MEMORY)
def test_a_change_of_a_tensors_memory_is_refused(
    capture: Capture, change: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(CaptureError, match="changes a tensor's memory"):
        capture(change, floats(3, 4))


@pytest.mark.parametrize("change", MEMORY.values(), ids=MEMORY)
def test_a_refused_change_of_memory_does_not_happen(
    capture: Capture, change: Callable[[Tensor], Any]
) -> None:
    x = floats(3, 4)
    with pytest.raises(CaptureError):
        capture(change, x)
    assert (x.shape, x.stride()) == ((3, 4), (4, 1))


GEOMETRY: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze_": lambda x: x.squeeze_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "as_strided_": lambda x: x.as_strided_((2,), (1,)),
}


@pytest.mark.parametrize("change", GEOMETRY.values(), ids=GEOMETRY)
def test_a_change_of_geometry_in_place_is_made_at_once(
    capture: Capture, change: Callable[[Tensor], Tensor]
) -> None:
    x = floats(3, 4)
    eager = change(floats(3, 4))
    graph, result = capture(change, x)
    assert result is x
    assert (x.shape, x.stride()) == (eager.shape, eager.stride())
    assert graph.segments[0].operations == ()


def test_operations_before_and_after_a_change_of_geometry_see_their_own(capture: Capture) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        rows = y.sum(0)
        y.t_()
        return rows, y.sum(0)

    x = floats(3, 4)
    graph, (columns, rows) = capture(run, x)
    x.add_(1)
    graph.replay()
    assert torch.equal(columns, (2 * x).sum(0))
    assert torch.equal(rows, (2 * x).sum(1))


LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "makes_sparse": lambda x: torch.sparse_coo_tensor(torch.zeros(1, 2).long(), x[0, :2], (4,)),
    "takes_sparse": lambda x: SPARSE + 1,
    "takes_jagged": lambda x: JAGGED + 1,
}
SPARSE = torch.eye(4).to_sparse()
JAGGED = torch.nested.nested_tensor_from_jagged(torch.ones(4, 2), torch.tensor([0, 1, 4]))


@pytest.mark.parametrize("run", LAYOUTS.values(), ids=LAYOUTS)
def test_a_tensor_of_another_layout_is_refused_by_name(
    capture: Capture, run: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(CaptureError, match=r"takes or makes a tensor of torch\.(sparse|jagged)"):
        capture(run, floats(3, 4))


@pytest.mark.parametrize("shape", [(0,), (4, 4), (9,)], ids=str)
def test_an_out_of_the_wrong_shape_is_refused(capture: Capture, shape: tuple[int, ...]) -> None:
    x, out = floats(3, 3), torch.zeros(shape)
    with pytest.raises(CaptureError, match="would resize its output"):
        capture(lambda: torch.mm(x, x, out=out))
    assert out.shape == shape


# Shape propagation finds wrong shapes; wrong dtypes and dimensions are found by the warm-up, or at replay.
ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "mm_of_wrong_shapes": lambda x: torch.mm(x, x),
    "view_of_wrong_size": lambda x: x.view(5, 5),
    "cat_of_wrong_shapes": lambda x: torch.cat([x, x.t()]),
    "add_of_wrong_shapes": lambda x: x + x.t(),
    "copy_of_wrong_shapes": lambda x: x.copy_(x.t()),
}


@pytest.mark.parametrize("mistake", ERRORS.values(), ids=ERRORS)
def test_a_mistaken_operation_raises_at_capture_what_eager_raises(
    capture: Capture, mistake: Callable[[Tensor], Any]
) -> None:
    with pytest.raises((RuntimeError, IndexError)) as eager:
        mistake(floats(3, 4))
    with pytest.raises(eager.type) as captured:
        capture(mistake, floats(3, 4))
    assert captured.type is eager.type


def test_a_mistaken_operation_is_raised_and_not_logged_as_well(
    capture: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError):
        capture(ERRORS["mm_of_wrong_shapes"], floats(3, 4))
    assert caplog.records == []


def test_an_index_out_of_range_is_found_at_replay(capture: Capture) -> None:
    graph, _ = capture(lambda: floats(3, 4).index_select(0, torch.full((1,), 7)))
    with pytest.raises(IndexError, match="out of range"):
        graph.replay()


# Custom operations


@pytest.fixture
def library() -> Any:
    with torch.library._scoped_library("bcg_test", "FRAGMENT") as library:
        yield library


def test_a_custom_operation_with_a_fake_implementation_is_recorded(
    capture: Capture, library: Any
) -> None:
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    torch.library.register_fake("bcg_test::twice", torch.empty_like, lib=library)
    x = floats(3)
    graph, result = capture(torch.ops.bcg_test.twice, x)
    assert result.isnan().all()
    x.mul_(5)
    graph.replay()
    assert result.tolist() == [10, 20, 30]


def test_a_custom_operation_without_a_fake_implementation_is_refused_with_a_hint(
    capture: Capture, library: Any
) -> None:
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x * 2, "CPU")
    with pytest.raises(CaptureError, match=r"opaque has no fake .*register_fake"):
        capture(torch.ops.bcg_test.opaque, floats(3))


def test_a_custom_operation_that_writes_its_argument_is_recorded(
    capture: Capture, library: Any
) -> None:
    library.define("fill_double(Tensor x, Tensor(a!) out) -> ()")
    library.impl("fill_double", lambda x, out: (out.copy_(x * 2), None)[1], "CPU")
    torch.library.register_fake("bcg_test::fill_double", lambda x, out: None, lib=library)
    x, out = floats(3), torch.zeros(3)
    graph, _ = capture(torch.ops.bcg_test.fill_double, x, out)
    assert out.tolist() == [0, 0, 0]
    graph.replay()
    assert out.tolist() == [2, 4, 6]


def test_a_custom_operation_whose_fake_reads_data_is_refused(
    capture: Capture, library: Any
) -> None:
    def shape_by_value(x: Tensor) -> Tensor:
        return x.new_empty(int(x.sum()))

    library.define("sized(Tensor x) -> Tensor")
    library.impl("sized", shape_by_value, "CPU")
    torch.library.register_fake("bcg_test::sized", shape_by_value, lib=library)
    with pytest.raises(HostReadError):
        capture(torch.ops.bcg_test.sized, floats(3))


def test_a_custom_operation_that_is_declared_a_view_and_copies_is_recorded(
    capture: Capture, library: Any
) -> None:
    library.define("maybe_view(Tensor(a) x) -> Tensor(a)")
    library.impl("maybe_view", lambda x: x.clone(), "CPU")
    torch.library.register_fake("bcg_test::maybe_view", torch.empty_like, lib=library)
    x = floats(3)
    graph, result = capture(torch.ops.bcg_test.maybe_view, x)
    assert result.isnan().all()
    x.mul_(5)
    graph.replay()
    assert result.tolist() == [5, 10, 15]


def test_the_python_code_of_a_custom_operation_does_not_run_at_capture(
    capture: Capture, library: Any
) -> None:
    runs: list[int] = []

    def noted(x: Tensor) -> Tensor:
        runs.append(1)
        return x.clone()

    library.define("noted(Tensor x) -> Tensor")
    library.impl("noted", noted, "CPU")
    torch.library.register_fake("bcg_test::noted", torch.empty_like, lib=library)
    capture(torch.ops.bcg_test.noted, floats(3))
    assert runs == []


# Begin, end, abort


def test_operations_before_and_after_a_capture_run(engine: Any) -> None:
    with engine.capturing():
        outside = floats(2) + 1
        engine.begin()
        inside = floats(2) + 1
        engine.end()
        after = floats(2) + 1
    assert (outside.tolist(), after.tolist()) == ([2, 3], [2, 3])
    assert inside.isnan().all()


def test_an_aborted_segment_leaves_the_engine_ready_for_another(engine: Any) -> None:
    x = floats(2)
    with engine.capturing():
        engine.begin()
        x.add_(1)
        engine.abort()
        engine.begin()
        x.mul_(3)
        segment = engine.end()
    segment.replay()
    assert x.tolist() == [3, 6]


def test_after_an_abort_operations_run(engine: Any) -> None:
    with engine.capturing():
        engine.begin()
        engine.abort()
        after = floats(2) + 1
    assert after.tolist() == [2, 3]


def test_a_refusal_is_forgotten_with_its_segment(engine: Any) -> None:
    with engine.capturing():
        engine.begin()
        swallow(lambda: floats(2).sum().item())
        engine.abort()
        engine.begin()
        assert engine.end() is not None


def test_abort_outside_a_capture_does_nothing(engine: Any) -> None:
    engine.abort()
    with engine.capturing():
        engine.abort()


def test_warming_up_runs_operations(engine: Any) -> None:
    with engine.warming_up():
        assert (floats(2) + 1).tolist() == [2, 3]


def test_the_device_is_the_cpu(engine: Any) -> None:
    assert engine.device == torch.device("cpu")
