"""What a break returns: copied to where it was at capture, or refused by the name of the break."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, BreakOutputError, eager_on_graph

Capture = Callable[..., Any]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Returning:
    """A break that returns what a test puts into ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.call = eager_on_graph(name="the break")(lambda: self.value)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def test_a_new_tensor_is_copied_to_the_captured_address(capture: Capture) -> None:
    breaks = Returning(ones(2))
    graph, (held, total) = capture(lambda: ((y := breaks.call()), y + 1))
    address = held.data_ptr()
    breaks.value = torch.tensor([4.0, 5.0])
    graph.replay()
    assert held.data_ptr() == address
    assert held.tolist() == [4, 5]
    assert total.tolist() == [5, 6]


def test_a_tensor_returned_again_is_not_copied(capture: Capture) -> None:
    kept = ones(2)
    breaks = Returning(kept)
    graph, total = capture(lambda: breaks.call() + 1)
    version = kept._version
    kept.fill_(8)
    graph.replay()
    assert kept._version == version + 1
    assert total.tolist() == [9, 9]


def test_a_view_of_the_captured_memory_is_not_copied(capture: Capture) -> None:
    base = ones(2, 3)
    breaks = Returning(base[0])
    graph, _ = capture(breaks.call)
    version = base._version
    breaks.value = base[0]
    graph.replay()
    assert base._version == version


def test_a_tensor_at_other_strides_is_copied(capture: Capture) -> None:
    base = torch.arange(4.0).reshape(2, 2)
    breaks = Returning(base.clone())
    graph, total = capture(lambda: breaks.call() * 1)
    breaks.value = base.t()
    graph.replay()
    assert total.tolist() == [[0, 2], [1, 3]]


def test_a_transpose_of_the_captured_memory_is_put_in_place(capture: Capture) -> None:
    base = torch.arange(4.0).reshape(2, 2)
    breaks = Returning(base)
    graph, total = capture(lambda: breaks.call() * 1)
    breaks.value = base.t()
    graph.replay()
    assert total.tolist() == [[0, 2], [1, 3]]


def test_two_results_that_swap_their_memory_are_both_put_in_place(capture: Capture) -> None:
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    breaks = Returning((a, b))
    graph, total = capture(lambda: torch.cat(breaks.call()))
    breaks.value = (b, a)
    graph.replay()
    assert total.tolist() == [2, 1]


def test_a_result_that_overlaps_the_captured_memory_is_put_in_place(capture: Capture) -> None:
    base = torch.arange(4.0)
    breaks = Returning(base[:3])
    graph, total = capture(lambda: breaks.call() * 1)
    breaks.value = base[1:]
    graph.replay()
    assert total.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("captured", "new"),
    [
        ((ones(2), [ones(3)]), lambda: (ones(2) * 2, [ones(3) * 2])),
        ({"a": ones(2), "b": (ones(3),)}, lambda: {"a": ones(2) * 2, "b": (ones(3) * 2,)}),
        ([[[ones(2)]]], lambda: [[[ones(2) * 2]]]),
        (Pair(ones(2), ones(3)), lambda: Pair(ones(2) * 2, ones(3) * 2)),
    ],
    ids=["tuple", "dict", "nested_list", "namedtuple"],
)
def test_tensors_in_a_nested_result_are_copied(
    capture: Capture, captured: Any, new: Callable[[], Any]
) -> None:
    leaves = torch.utils._pytree.tree_leaves(captured)
    breaks = Returning(captured)
    graph, _ = capture(breaks.call)
    breaks.value = new()
    graph.replay()
    assert [leaf.tolist() for leaf in leaves] == [[2.0] * len(leaf) for leaf in leaves]


@pytest.mark.parametrize("value", [None, 3, "text", (1, None), {"a": 2.5}, ()], ids=repr)
def test_an_equal_value_is_accepted(capture: Capture, value: Any) -> None:
    graph, returned = capture(Returning(value).call)
    graph.replay()
    assert returned == value


def test_an_empty_tensor_is_accepted(capture: Capture) -> None:
    breaks = Returning(ones(0, 3))
    graph, _ = capture(breaks.call)
    breaks.value = ones(0, 3)
    graph.replay()


def test_a_result_of_an_inference_mode_capture_is_copied_outside_of_it(
    graph: BreakableCUDAGraph,
) -> None:
    with torch.inference_mode():
        breaks = Returning(ones(2))
        with BreakableCUDAGraphCapture(graph):
            total = breaks.call() + 1
    breaks.value = ones(2) * 5
    graph.replay()
    assert total.tolist() == [6, 6]


DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "shape": (ones(2), ones(3), r"shape .*torch.Size\(\[3\]\) instead of torch.Size\(\[2\]\)"),
    "shape_that_would_broadcast": (ones(2, 2), ones(1, 2), "shape"),
    "number_of_dimensions": (ones(2), ones(2, 1), "shape"),
    "dtype": (ones(2), ones(2).double(), "dtype .*torch.float64 instead of torch.float32"),
    "device": (ones(2), torch.ones(2, device="meta"), "device .*meta instead of cpu"),
    "structure": ((ones(2), ones(2)), (ones(2),), "structure"),
    "list_for_tuple": ((ones(2),), [ones(2)], "structure"),
    "key": ({"a": ones(2)}, {"b": ones(2)}, "structure"),
    "none_for_tensor": (ones(2), None, "type .*NoneType instead of a tensor"),
    "tensor_for_none": (None, ones(2), "value"),
    "number_for_tensor": (ones(1), 1.0, "type .*float instead of a tensor"),
    "tensor_for_number": (1.0, torch.tensor(1.0), "value"),
    "value": (3, 4, "value .*4 instead of 3"),
    "flag": ((True, 1), (False, 1), "value"),
    "text": ("a", "b", "value .*b instead of a"),
}


@pytest.mark.parametrize(("captured", "new", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_different_result_is_refused_by_the_name_of_the_break(
    capture: Capture, captured: Any, new: Any, message: str
) -> None:
    breaks = Returning(captured)
    graph, _ = capture(breaks.call)
    breaks.value = new
    with pytest.raises(BreakOutputError, match=f"'the break' returned another {message}"):
        graph.replay()


def test_a_different_result_copies_nothing(capture: Capture) -> None:
    first, second = ones(2), ones(2)
    breaks = Returning((first, second))
    graph, _ = capture(breaks.call)
    breaks.value = (torch.zeros(2), torch.zeros(3))
    with pytest.raises(BreakOutputError):
        graph.replay()
    assert first.tolist() == [1, 1]


def test_a_different_result_runs_no_later_segment(capture: Capture) -> None:
    breaks, x = Returning(ones(2)), torch.zeros(1)
    graph, _ = capture(lambda: (breaks.call(), x.add_(1)))
    breaks.value = ones(3)
    with pytest.raises(BreakOutputError):
        graph.replay()
    assert x.tolist() == [0]


def test_a_graph_replays_again_after_a_different_result(capture: Capture) -> None:
    breaks = Returning(ones(2))
    graph, total = capture(lambda: breaks.call() + 1)
    breaks.value = ones(3)
    with pytest.raises(BreakOutputError):
        graph.replay()
    breaks.value = ones(2) * 7
    graph.replay()
    assert total.tolist() == [8, 8]
