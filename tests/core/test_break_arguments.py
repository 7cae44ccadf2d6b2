"""What a break is called with at replay: lists, tuples and dicts as they were, other objects as they are."""

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, eager_on_graph
from bcg_core.debug import WatchedEngine

Capture = Callable[..., Any]


class Pair(NamedTuple):
    first: list[Any]
    second: int


class OwnList(list[Any]):
    """A list with a behaviour of its own, as a model may have."""


def one() -> Tensor:
    return torch.ones(1)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "list": (lambda: [1, 2], lambda parts: parts.append(3), [1, 2]),
    "emptied_list": (lambda: [1, 2], lambda parts: parts.clear(), [1, 2]),
    "dict": (lambda: {"a": 1}, lambda parts: parts.update(b=2), {"a": 1}),
    "replaced_value": (lambda: {"a": 1}, lambda parts: parts.update(a=2), {"a": 1}),
    "list_in_a_tuple": (lambda: ([1],), lambda parts: parts[0].append(2), ([1],)),
    "list_in_a_dict": (lambda: {"a": [1]}, lambda parts: parts["a"].append(2), {"a": [1]}),
    "dict_in_a_list": (lambda: [{"a": 1}], lambda parts: parts[0].clear(), [{"a": 1}]),
    "list_in_a_named_tuple": (
        lambda: Pair([1], 2),
        lambda parts: parts.first.append(2),
        Pair([1], 2),
    ),
}


@pytest.mark.parametrize(("make", "change", "then"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_a_container_that_is_changed_after_the_call_is_replayed_as_it_was(
    capture: Capture,
    make: Callable[[], Any],
    change: Callable[[Any], Any],
    then: Any,
    keyword: bool,
) -> None:
    seen: list[Any] = []
    look = eager_on_graph(lambda parts: seen.append(parts))
    parts = make()
    graph, _ = capture(lambda: look(parts=parts) if keyword else look(parts))
    change(parts)
    graph.replay()
    assert seen == [then, then]
    assert type(seen[1]) is type(then)


def test_two_breaks_over_one_list_that_grows_between_them_agree_with_eager(
    capture: Capture,
) -> None:
    @eager_on_graph
    def total(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = [x + 1]
        a = total(parts) + 0
        parts.append(x * 10)
        return a, total(parts) + 0

    x = one()
    graph, replayed = capture(run, x)
    x.fill_(3)
    graph.replay()
    assert [value.item() for value in replayed] == [4, 34]
    assert [value.item() for value in run(x)] == [4, 34]


def test_a_break_that_changes_its_list_starts_anew_at_every_call(capture: Capture) -> None:
    lengths: list[int] = []

    @eager_on_graph
    def grow(parts: list[int]) -> None:
        parts.append(0)
        lengths.append(len(parts))

    graph, _ = capture(lambda: grow([1]))
    graph.replay()
    graph.replay()
    assert lengths == [2, 2, 2]


def test_what_a_break_does_to_its_list_is_not_seen_by_its_caller_at_capture(
    capture: Capture,
) -> None:
    fill = eager_on_graph(lambda parts: parts.append(1))
    parts: list[int] = []
    capture(fill, parts)
    assert parts == []


def test_tensors_in_a_container_are_read_at_their_address(capture: Capture) -> None:
    seen: list[float] = []
    look = eager_on_graph(lambda parts: seen.append(parts[0].item()))
    x = one()
    graph, _ = capture(look, [x])
    x.fill_(7)
    graph.replay()
    assert seen == [1, 7]


class Registered:
    """An object that pytree takes apart, as it does with some libraries' caches of keys and values."""


@pytest.fixture
def registered() -> Iterator[None]:
    pytree.register_pytree_node(Registered, lambda _: ([], None), lambda _, __: Registered())
    yield
    pytree._deregister_pytree_node(Registered)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "kind", [OwnList, UserDict, set, Registered], ids=lambda kind: kind.__name__
)
def test_other_objects_are_passed_by_identity(capture: Capture, kind: type[Any]) -> None:
    seen: list[Any] = []
    look = eager_on_graph(lambda parts: seen.append(parts[0]))
    given = kind()
    graph, _ = capture(look, [given])
    graph.replay()
    assert seen[0] is seen[1] is given


def test_a_list_that_is_given_twice_is_one_list_again(capture: Capture) -> None:
    same: list[bool] = []
    look = eager_on_graph(lambda one, other: same.append(one is other))
    parts = [1]
    graph, _ = capture(look, parts, parts)
    graph.replay()
    assert same == [True, True]


def test_a_list_that_contains_itself_is_rebuilt(capture: Capture) -> None:
    same: list[bool] = []
    look = eager_on_graph(lambda parts: same.append(parts[0] is parts))
    parts: list[Any] = []
    parts.append(parts)
    graph, _ = capture(look, parts)
    graph.replay()
    assert same == [True, True]


def test_without_rebuilding_a_break_sees_what_was_changed_later(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bcg_core.arguments.rebuilt", lambda tree: tree)
    seen: list[int] = []
    look = eager_on_graph(lambda parts: seen.append(len(parts)))
    parts = [1]
    graph, _ = capture(look, parts)
    parts.append(2)
    graph.replay()
    assert seen == [1, 2]


def test_debug_tools_see_the_tensors_in_rebuilt_containers(engine: Any) -> None:
    graph, x = BreakableCUDAGraph(WatchedEngine(engine)), one()
    look = eager_on_graph(lambda parts: None)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        look([x])
    x.data = torch.zeros(1)
    with pytest.raises(RuntimeError, match="argument of break 0"):
        graph.replay()
