"""What a break returns: copied to where it was at capture, or refused by the name of the break."""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
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


# What cannot be put back


class Plain:
    """An object with a tensor in an attribute."""

    def __init__(self) -> None:
        self.t = ones(2)


class Tagged(float):
    """A number that carries more."""

    t: Tensor


def tagged() -> Tagged:
    number = Tagged(1.0)
    number.t = ones(2)
    return number


@dataclass
class Part:
    x: Tensor
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Slots:
    x: Tensor


@dataclass
class Whole:
    part: Part
    rest: list[Tensor] = field(default_factory=list)


class Colour(Enum):
    RED = 1


def cyclic() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


def overlapping() -> tuple[Tensor, Tensor]:
    base = ones(4)
    return base[:3], base[1:]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let torch warn of the layouts that it is about to give up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


NOT_PUT_BACK: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (Plain, "an object of .*Plain"),
    "object_in_a_tuple": (lambda: (ones(1), Plain()), "an object of .*Plain"),
    "object_in_a_dataclass": (lambda: Part(Plain()), "an object of .*Plain"),  # type: ignore[arg-type]
    "number_with_attributes": (tagged, "an object of .*Tagged"),
    "function": (lambda: ones, "an object of builtins.function"),
    "generator": (lambda: iter([ones(1)]), "an object of builtins.list_iterator"),
    "numpy_array": (lambda: np.ones(2), "an object of numpy.ndarray"),
    "set_of_tensors": (lambda: {ones(1)}, "an object of builtins.set"),
    "expanded": (lambda: ones(1, 3).expand(2, 3), "an expanded tensor"),
    "overlapping_windows": (lambda: ones(4).unfold(0, 2, 1), "whose elements share memory"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "a conjugate or negative"),
    "negative": (
        lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
        "a conjugate or negative",
    ),
    "sparse": (lambda: ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
    "sparse_rows": (lambda: ones(2, 2).to_sparse_csr(), "layout torch.sparse_csr"),
    "quantized": (
        lambda: torch.quantize_per_tensor(ones(2), 1.0, 0, torch.qint8),
        "layout quantized",
    ),
    "nested": (lambda: torch.nested.nested_tensor([ones(2)]), "layout nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([ones(2)], layout=torch.jagged),
        "layout nested",
    ),
    "meta": (lambda: torch.ones(2, device="meta"), "the meta device"),
    "overlapping": (overlapping, "share some of their memory"),
    "part_and_whole": (lambda: ((base := ones(2, 2)), base[0]), "share some of their memory"),
    "itself": (cyclic, "contains itself"),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("make", "message"), NOT_PUT_BACK.values(), ids=NOT_PUT_BACK)
def test_what_cannot_be_put_back_is_refused_at_capture_by_the_name_of_the_break(
    capture: Capture, make: Callable[[], Any], message: str
) -> None:
    breaks = Returning(make())
    with pytest.raises(BreakOutputError, match=f"'the break' returned at capture .*{message}"):
        capture(breaks.call)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "kind",
    ["sparse", "quantized", "nested", "jagged", "meta", "numpy_array", "object", "itself"],
)
@pytest.mark.parametrize("captured", [ones(2, 2), 1, None, [1]], ids=["tensor", "1", "None", "[1]"])
def test_what_cannot_be_put_back_is_refused_at_replay_by_the_name_of_the_break(
    capture: Capture, kind: str, captured: Any
) -> None:
    breaks = Returning(captured)
    graph, _ = capture(breaks.call)
    breaks.value = NOT_PUT_BACK[kind][0]()
    with pytest.raises(BreakOutputError, match="'the break' returned another"):
        graph.replay()


def test_without_a_refusal_an_object_goes_stale(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcg_core.outputs.is_plain", lambda value: not isinstance(value, Tensor))
    monkeypatch.setattr("bcg_core.outputs.equal", lambda one, other: True)
    holder, x = Plain(), ones(2)

    @eager_on_graph
    def double() -> Plain:
        holder.t = x * 2
        return holder

    graph, total = capture(lambda: double().t + 1)
    graph.replay()
    x.fill_(5)
    graph.replay()
    assert total.tolist() == [3, 3]


# Dataclasses


@pytest.mark.parametrize("kind", [Part, Slots], ids=["dataclass", "slots"])
def test_tensors_in_a_dataclass_are_copied(capture: Capture, kind: Callable[[Tensor], Any]) -> None:
    breaks = Returning(kind(ones(2)))
    graph, total = capture(lambda: breaks.call().x + 1)
    breaks.value = kind(ones(2) * 5)
    graph.replay()
    assert total.tolist() == [6, 6]


def test_tensors_in_nested_dataclasses_are_copied(capture: Capture) -> None:
    breaks = Returning(Whole(Part(ones(1)), [ones(1)]))
    graph, total = capture(lambda: (w := breaks.call()).part.x + w.rest[0])
    breaks.value = Whole(Part(ones(1) * 2), [ones(1) * 3])
    graph.replay()
    assert total.tolist() == [5]


def test_a_tensor_in_an_undeclared_attribute_of_a_dataclass_is_copied(capture: Capture) -> None:
    def made(value: float) -> Any:
        part: Any = Part(ones(1))
        part.more = ones(1) * value
        return part

    breaks = Returning(made(1))
    graph, total = capture(lambda: breaks.call().more + 1)
    breaks.value = made(4)
    graph.replay()
    assert total.tolist() == [5]


@pytest.mark.parametrize(
    "new",
    [Part(ones(2), scale=2.0), Slots(ones(2)), (ones(2), 1.0)],
    ids=["value", "another_class", "tuple"],
)
def test_a_different_dataclass_is_refused(capture: Capture, new: Any) -> None:
    breaks = Returning(Part(ones(2)))
    graph, _ = capture(breaks.call)
    breaks.value = new
    with pytest.raises(BreakOutputError, match="'the break' returned another"):
        graph.replay()


# Plain values


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        complex("nan"),
        np.float32("nan"),
        np.int64(3),
        Fraction(1, 3),
        -0.0,
        b"text",
        Colour.RED,
        torch.float32,
        torch.device("cpu"),
        torch.strided,
        frozenset({1}),
        {1, 2},
        torch.Size([2]),
    ],
    ids=repr,
)
def test_a_value_that_is_made_again_is_accepted(capture: Capture, value: Any) -> None:
    breaks = Returning(value)
    graph, _ = capture(breaks.call)
    breaks.value = copy.deepcopy(value)
    graph.replay()


@pytest.mark.parametrize(
    ("captured", "new"),
    [(1, 1.0), (1, True), (0.0, -0.0), (1.0, float("nan")), (1.0, np.float32(1)), ({1}, {1, 2})],
    ids=repr,
)
def test_values_that_segments_tell_apart_are_refused(
    capture: Capture, captured: Any, new: Any
) -> None:
    breaks = Returning(captured)
    graph, _ = capture(breaks.call)
    breaks.value = new
    with pytest.raises(BreakOutputError, match="returned another value"):
        graph.replay()


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        ({1}, lambda kept: kept.add(2)),
        ([1], lambda kept: kept.append(2)),
        ({"a": 1}, lambda kept: kept.update(a=2)),
    ],
    ids=["set", "list", "dict"],
)
def test_a_container_that_the_break_keeps_and_changes_is_refused(
    capture: Capture, kept: Any, change: Callable[[Any], None]
) -> None:
    graph, _ = capture(Returning(kept).call)
    change(kept)
    with pytest.raises(BreakOutputError, match="returned another"):
        graph.replay()


def test_a_dict_in_another_order_is_put_back_by_its_keys(capture: Capture) -> None:
    breaks = Returning({"a": ones(1), "b": ones(1)})
    graph, total = capture(lambda: torch.cat([(d := breaks.call())["a"], d["b"]]))
    breaks.value = {"b": ones(1) * 3, "a": ones(1) * 2}
    graph.replay()
    assert total.tolist() == [2, 3]


# Views and shared memory


@pytest.mark.parametrize("view", [Tensor.conj, lambda x: x.conj().conj()], ids=["once", "twice"])
def test_a_conjugate_view_of_the_captured_memory_is_put_in_place(
    capture: Capture, view: Callable[[Tensor], Tensor]
) -> None:
    base = torch.tensor([1 + 2j])
    breaks = Returning(base)
    graph, total = capture(lambda: breaks.call() * 1)
    expected = view(base).resolve_conj().tolist()
    breaks.value = view(base)
    graph.replay()
    assert total.tolist() == expected


def test_an_expanded_result_is_copied_into_a_dense_one(capture: Capture) -> None:
    breaks = Returning(ones(2, 2))
    graph, total = capture(lambda: breaks.call() + 0)
    breaks.value = torch.tensor([4.0, 5.0]).expand(2, 2)
    graph.replay()
    assert total.tolist() == [[4, 5], [4, 5]]


def test_parts_of_one_tensor_that_do_not_overlap_are_put_in_place(capture: Capture) -> None:
    breaks = Returning(ones(2, 4).split(2, dim=1))
    graph, total = capture(lambda: (r := breaks.call())[0] + 10 * r[1])
    breaks.value = torch.arange(8.0).reshape(2, 4).split(2, dim=1)
    graph.replay()
    assert total.tolist() == [[20, 31], [64, 75]]


def test_what_lies_between_small_results_of_a_large_memory_alone_is_compared(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    zeros = torch.zeros
    memory = ones(1 << 20)
    breaks = Returning((memory[:8:2], memory[1:9:2], memory[100:]))
    monkeypatch.setattr(torch, "zeros", lambda n, **kwargs: made.append(n) or zeros(n, **kwargs))
    capture(breaks.call)
    assert made == [32]


def test_a_tensor_that_is_returned_twice_is_put_in_place(capture: Capture) -> None:
    both = ones(1)
    breaks = Returning((both, both))
    graph, total = capture(lambda: (r := breaks.call())[0] + r[1])
    new = ones(1) * 4
    breaks.value = (new, new)
    graph.replay()
    assert total.tolist() == [8]


def test_two_tensors_where_there_was_one_twice_are_refused(capture: Capture) -> None:
    both = ones(1)
    breaks = Returning((both, both))
    graph, _ = capture(breaks.call)
    breaks.value = (ones(1) * 4, ones(1) * 5)
    with pytest.raises(BreakOutputError, match="two tensors instead of one tensor twice"):
        graph.replay()


def test_one_tensor_where_there_were_two_is_copied_to_both(capture: Capture) -> None:
    breaks = Returning((ones(1), ones(1)))
    graph, total = capture(lambda: (r := breaks.call())[0] + 10 * r[1])
    new = ones(1) * 4
    breaks.value = (new, new)
    graph.replay()
    assert total.tolist() == [44]
