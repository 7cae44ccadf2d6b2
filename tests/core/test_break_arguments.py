"""What a break was given: containers as they were at capture, everything else by identity."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bcg_core import eager_on_graph

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


def test_a_break_does_not_see_what_its_last_call_did_to_a_list(capture: Capture) -> None:
    seen: list[int] = []

    @eager_on_graph
    def push(items: list[int]) -> None:
        items.append(0)
        seen.append(len(items))

    graph, _ = capture(push, [])
    graph.replay()
    graph.replay()
    assert seen == [1, 1, 1]


def test_an_object_is_passed_by_identity(capture: Capture) -> None:
    seen: list[Any] = []
    look = eager_on_graph(lambda parts: seen.append(parts[0]))
    state = SimpleNamespace()
    graph, _ = capture(look, [state])
    graph.replay()
    assert seen == [state, state]
