"""What a break was given: containers as they were at capture, everything else by identity."""

from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, CaptureError, eager_on_graph
from bcg_core.debug import WatchedEngine

Capture = Callable[..., Any]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@eager_on_graph
def total(parts: Any) -> Tensor:
    """Add up all tensors in a container."""
    return torch.stack([part.sum() for part in torch.utils._pytree.tree_leaves(parts)]).sum()


def test_a_list_that_grows_after_the_call_does_not_grow_for_the_break(capture: Capture) -> None:
    x = torch.ones(1)

    def run() -> tuple[Tensor, Tensor]:
        parts = [x + 1]
        a = total(parts) + 0
        parts.append(x * 10)
        return a, total(parts) + 0

    graph, (a, b) = capture(run)
    x.fill_(2)
    graph.replay()
    assert (a.item(), b.item()) == (3, 23)


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Any]]] = {
    "list": (lambda x: [x], lambda c, y: c.append(y)),
    "dict": (lambda x: {"a": x}, lambda c, y: c.update(b=y)),
    "list in a tuple": (lambda x: ([x],), lambda c, y: c[0].append(y)),
    "dict in a list": (lambda x: [{"a": x}], lambda c, y: c[0].update(b=y)),
    "list in a named tuple": (lambda x: Pair(x, [x]), lambda c, y: c.second.append(y)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("make", "change"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_container_is_as_it_was_at_capture(
    capture: Capture, make: Callable[[Tensor], Any], change: Callable[[Any, Tensor], Any]
) -> None:
    container = make(torch.ones(1))
    graph, result = capture(lambda: total(container) + 0)
    before = total(container)
    change(container, torch.full((1,), 100.0))
    graph.replay()
    assert torch.equal(result, before)


def test_a_container_in_keyword_arguments_is_as_it_was_at_capture(capture: Capture) -> None:
    parts = [torch.ones(1)]
    graph, result = capture(lambda: total(parts=parts) + 0)
    parts.append(torch.ones(1))
    graph.replay()
    assert result.item() == 1


def test_the_type_of_a_container_stays(capture: Capture) -> None:
    seen: list[Any] = []
    look = eager_on_graph(lambda pair: seen.append(type(pair)))
    graph, _ = capture(look, Pair(torch.ones(1), torch.ones(1)))
    graph.replay()
    assert seen == [Pair, Pair]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an item of a list": (lambda: [1.0], lambda c: c.__setitem__(0, 2.0)),
    "a longer list": (lambda: [], lambda c: c.append(1)),
    "a list in a tuple": (lambda: ([],), lambda c: c[0].append(1)),
    "a key of a dict": (lambda: {}, lambda c: c.update(a=1)),
    "a value of a dict": (lambda: {"a": 1.5}, lambda c: c.update(a=2.5)),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_break_that_changes_a_container_is_refused_at_capture(
    capture: Capture, make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    # In eager code its caller would see the change, and at replay nobody.
    with pytest.raises(CaptureError, match=r"a break changed a (list|dict) that it was given"):
        capture(eager_on_graph(change), make())


def test_a_break_that_changes_a_list_at_replay_is_refused(capture: Capture) -> None:
    state = SimpleNamespace(changes=False)
    graph, _ = capture(eager_on_graph(lambda items: items.append(0) if state.changes else None), [])
    state.changes = True
    with pytest.raises(CaptureError, match="a break changed a list"):
        graph.replay()
    state.changes = False
    graph.replay()


def test_an_object_is_passed_by_identity(capture: Capture) -> None:
    seen: list[Any] = []
    look = eager_on_graph(lambda parts: seen.append(parts[0]))
    state = SimpleNamespace()
    graph, _ = capture(look, [state])
    graph.replay()
    assert seen == [state, state]


# What is rebuilt, and what is not


class OwnList(list[Any]):
    """A list with a behaviour of its own, as a model may have."""


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


@pytest.mark.parametrize(
    "kind", [list, deque, OrderedDict, defaultdict], ids=lambda kind: kind.__name__
)
def test_a_container_of_the_library_is_rebuilt_as_what_it_is(
    capture: Capture, kind: type[Any]
) -> None:
    seen: list[Any] = []
    look = eager_on_graph(lambda container: seen.append(container))
    container = kind()
    graph, _ = capture(look, container)
    container.append(1) if hasattr(container, "append") else container.update(a=1)
    graph.replay()
    assert seen == [kind(), kind()]
    assert {type(each) for each in seen} == {kind}


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
    graph, x = BreakableCUDAGraph(WatchedEngine(engine)), torch.ones(1)
    look = eager_on_graph(lambda parts: None)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        look([x])
    x.data = torch.zeros(1)
    with pytest.raises(RuntimeError, match="argument of break 0"):
        graph.replay()
