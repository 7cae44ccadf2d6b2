"""What no replay could put back is refused at capture, in a sentence that names the break."""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bcg_core import BreakOutputError, eager_on_graph

Capture = Callable[..., Any]


class Returning:
    """A break that returns what a test puts into ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.call = eager_on_graph(name="the break")(lambda: self.value)


@dataclass
class Pair:
    first: Tensor
    second: Any = 0


@dataclass(frozen=True)
class FrozenPair:
    first: Tensor
    second: Any = 0


@dataclass(slots=True)
class Slots:
    first: Tensor


def overlapping() -> list[Tensor]:
    base = torch.ones(4)
    return [base[:3], base[1:]]


class Tagged(float):
    """A number that carries more."""

    t: Tensor


def tagged(value: float) -> Tagged:
    number = Tagged(value)
    number.t = torch.ones(1)
    return number


def cyclic() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


def nested() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # a prototype
        return torch.nested.nested_tensor([torch.ones(2)])


def quantized() -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # to be removed
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an object that carries a tensor": (lambda: SimpleNamespace(t=torch.ones(1)), "an object of"),
    "an object in a list": (lambda: [object()], "an object of builtins.object"),
    "a function": (lambda: len, "an object of"),
    "a numpy array": (lambda: np.ones(2), "an object of numpy.ndarray"),
    "a set with a tensor": (lambda: {torch.ones(1)}, "an object of builtins.set"),
    "an expanded tensor": (lambda: torch.ones(1).expand(3), "an expanded tensor"),
    "a conjugate view": (
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        "a conjugate or negative view",
    ),
    "a negative view": (
        lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
        "a conjugate or negative view",
    ),
    "overlapping windows": (lambda: torch.ones(4).unfold(0, 2, 1), "whose elements share memory"),
    "a list iterator": (lambda: iter([torch.ones(1)]), "an object of builtins.list_iterator"),
    "an object in a dataclass": (lambda: Pair(SimpleNamespace()), "an object of"),  # type: ignore[arg-type]
    "a number that carries a tensor": (lambda: tagged(1.0), "an object of .*Tagged"),
    "a list that contains itself": (lambda: cyclic(), "contains itself"),
    "a tensor and a part of it": (lambda: [(base := torch.ones(2, 2)), base[0]], "share some of"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "a nested tensor": (nested, "layout nested"),
    "a quantized tensor": (quantized, "layout quantized"),
    "a tensor without memory": (lambda: torch.ones(2, device="meta"), "the meta device"),
    "tensors that overlap": (overlapping, "share some of their memory"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_put_back_is_refused_at_capture(
    capture: Capture, make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(BreakOutputError) as caught:
        capture(Returning(make()).call)
    message = str(caught.value)
    assert message.startswith("break 'the break' returned at capture what no replay could put back")
    assert re.search(words, message)


AT_REPLAY: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "an array for a tensor": (torch.ones(2), lambda: np.ones(2), "another type"),
    "an array for a number": (3, lambda: np.ones(2), "another value"),
    "an object for a list": ([1], object, "another structure"),
    "a sparse tensor for a dense one": (torch.eye(2), lambda: torch.eye(2).to_sparse(), "layout"),
    "a nested tensor for a dense one": (torch.ones(1, 2), nested, "layout"),
    "a quantized tensor for a dense one": (torch.ones(2), quantized, "layout"),
    "a list that contains itself": ([1], cyclic, "another value"),
    "a number that carries a tensor": (1.0, lambda: tagged(1.0), "another value"),
    "a float for an integer": (1, lambda: 1.0, r"another value than at capture: 1\.0 instead of 1"),
    "a truth value for an integer": (1, lambda: True, "another value"),
    "minus zero for zero": (0.0, lambda: -0.0, "another value"),
    "a larger set": ({1}, lambda: {1, 2}, "another value"),
    "two tensors for one twice": (
        [ONE := torch.ones(1), ONE],
        lambda: [torch.ones(1), torch.ones(1)],
        "another structure",
    ),
    "another number for NaN": (float("nan"), lambda: 1.0, "another value"),
    "another field of a dataclass": (
        Pair(torch.ones(1), 1),
        lambda: Pair(torch.ones(1), 2),
        "another value",
    ),
    "a dataclass of another kind": (
        Pair(torch.ones(1)),
        lambda: FrozenPair(torch.ones(1)),
        "another structure",
    ),
}


@pytest.mark.parametrize(("captured", "make", "words"), AT_REPLAY.values(), ids=AT_REPLAY)
def test_another_kind_of_result_at_replay_is_refused_in_a_sentence(
    capture: Capture, captured: Any, make: Callable[[], Any], words: str
) -> None:
    breaks = Returning(captured)
    graph, _ = capture(breaks.call)
    breaks.value = make()
    with pytest.raises(BreakOutputError, match=f"break 'the break' returned .*{words}"):
        graph.replay()


@pytest.mark.parametrize(
    "value",
    [float("nan"), complex("nan"), torch.float32, torch.device("cpu"), {1, 2}, b"bytes"],
    ids=repr,
)
def test_a_plain_value_is_equal_to_itself(capture: Capture, value: Any) -> None:
    graph, _ = capture(Returning(value).call)
    graph.replay()


def test_another_nan_is_the_same_number(capture: Capture) -> None:
    breaks = Returning(float("nan"))
    graph, _ = capture(breaks.call)
    breaks.value = float("nan")
    graph.replay()


def test_a_dict_in_another_order_is_the_same_dict(capture: Capture) -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    breaks = Returning({"a": a, "b": b})
    graph, _ = capture(breaks.call)
    breaks.value = {"b": torch.full((1,), 2.0), "a": torch.full((1,), 1.0)}
    graph.replay()
    assert (a.item(), b.item()) == (1, 2)


@pytest.mark.parametrize("kind", [Pair, FrozenPair])
def test_tensors_of_a_dataclass_are_put_in_place(capture: Capture, kind: type[Any]) -> None:
    held = torch.zeros(2)
    breaks = Returning(kind(held, [held + 1]))
    graph, result = capture(lambda: breaks.call().first + 0)
    breaks.value = kind(torch.full((2,), 5.0), [torch.ones(2)])
    graph.replay()
    assert result.tolist() == [5, 5]


def test_a_container_that_changes_after_the_capture_changes_nothing(capture: Capture) -> None:
    held = torch.zeros(1)
    returned = [held]
    breaks = Returning(returned)
    graph, result = capture(lambda: breaks.call()[0] + 0)
    returned.append(torch.zeros(1))
    breaks.value = [torch.ones(1)]
    graph.replay()
    assert result.item() == 1


def test_a_conjugate_view_of_captured_memory_is_another_value(capture: Capture) -> None:
    held = torch.tensor([1 + 2j])
    breaks = Returning(held)
    graph, result = capture(lambda: breaks.call() + 0)
    breaks.value = held.conj()
    graph.replay()
    assert result.item() == 1 - 2j


def test_pieces_of_one_tensor_that_do_not_overlap_are_fine(capture: Capture) -> None:
    pieces = torch.zeros(2, 6).split(2, dim=1)
    breaks = Returning(pieces)
    graph, _ = capture(breaks.call)
    breaks.value = torch.arange(12.0).reshape(2, 6).split(2, dim=1)
    graph.replay()
    assert torch.cat(pieces, 1).flatten().tolist() == list(range(12))


@pytest.mark.parametrize(
    "value",
    [np.float32("nan"), np.int64(3), Fraction(1, 3), -0.0, frozenset({1}), torch.Size([2])],
    ids=repr,
)
def test_a_value_that_is_made_again_is_the_same(capture: Capture, value: Any) -> None:
    breaks = Returning(value)
    graph, _ = capture(breaks.call)
    breaks.value = copy.deepcopy(value)
    graph.replay()


def test_tensors_of_a_dataclass_with_slots_are_put_in_place(capture: Capture) -> None:
    breaks = Returning(Slots(torch.ones(2)))
    graph, total = capture(lambda: breaks.call().first + 1)
    breaks.value = Slots(torch.ones(2) * 5)
    graph.replay()
    assert total.tolist() == [6, 6]


def test_without_a_refusal_an_object_goes_stale(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcg_core.outputs.is_plain", lambda value: not isinstance(value, Tensor))
    monkeypatch.setattr("bcg_core.outputs.equal", lambda one, other: True)
    holder, x = SimpleNamespace(t=torch.ones(2)), torch.ones(2)

    @eager_on_graph
    def double() -> SimpleNamespace:
        holder.t = x * 2
        return holder

    graph, total = capture(lambda: double().t + 1)
    graph.replay()
    x.fill_(5)
    graph.replay()
    assert total.tolist() == [3, 3]


def test_a_tensor_in_an_undeclared_attribute_of_a_dataclass_is_copied(capture: Capture) -> None:
    def made(value: float) -> Any:
        part: Any = Pair(torch.ones(1))
        part.more = torch.ones(1) * value
        return part

    breaks = Returning(made(1))
    graph, total = capture(lambda: breaks.call().more + 1)
    breaks.value = made(4)
    graph.replay()
    assert total.tolist() == [5]


def test_a_tensor_that_is_returned_twice_is_put_in_place(capture: Capture) -> None:
    both = torch.ones(1)
    breaks = Returning((both, both))
    graph, total = capture(lambda: (r := breaks.call())[0] + r[1])
    new = torch.ones(1) * 4
    breaks.value = (new, new)
    graph.replay()
    assert total.tolist() == [8]


def test_one_tensor_where_there_were_two_is_copied_to_both(capture: Capture) -> None:
    breaks = Returning((torch.ones(1), torch.ones(1)))
    graph, total = capture(lambda: (r := breaks.call())[0] + 10 * r[1])
    new = torch.ones(1) * 4
    breaks.value = (new, new)
    graph.replay()
    assert total.tolist() == [44]


def test_an_expanded_result_is_copied_into_a_dense_one(capture: Capture) -> None:
    breaks = Returning(torch.ones(2, 2))
    graph, total = capture(lambda: breaks.call() + 0)
    breaks.value = torch.tensor([4.0, 5.0]).expand(2, 2)
    graph.replay()
    assert total.tolist() == [[4, 5], [4, 5]]


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


def test_what_lies_between_small_results_of_a_large_memory_alone_is_compared(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    zeros = torch.zeros
    memory = torch.ones(1 << 20)
    breaks = Returning((memory[:8:2], memory[1:9:2], memory[100:]))
    monkeypatch.setattr(torch, "zeros", lambda n, **kwargs: made.append(n) or zeros(n, **kwargs))
    capture(breaks.call)
    assert made == [32]
