"""What no replay could put back is refused at capture, in a sentence that names the break."""

from collections.abc import Callable
from dataclasses import dataclass
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


def overlapping() -> list[Tensor]:
    base = torch.ones(4)
    return [base[:3], base[1:]]


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
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
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
    assert words in message


AT_REPLAY: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "an array for a tensor": (torch.ones(2), lambda: np.ones(2), "another type"),
    "an array for a number": (3, lambda: np.ones(2), "another value"),
    "an object for a list": ([1], object, "another structure"),
    "a sparse tensor for a dense one": (torch.eye(2), lambda: torch.eye(2).to_sparse(), "layout"),
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
    with pytest.raises(BreakOutputError, match=f"break 'the break' returned {words}|{words}"):
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
