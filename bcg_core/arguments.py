"""What a break is called with: containers as they were at the call, everything else by identity."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from copy import copy
from functools import partial
from operator import is_not
from typing import Any

from bcg_core.errors import CaptureError

_CHANGEABLE = frozenset({list, dict, OrderedDict, defaultdict, deque})


def frozen_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> partial[Any]:
    """Return a call of ``fn`` that knows nothing of later changes to lists, tuples and dicts among its arguments.

    Each call gets containers of its own, so that it does not see what the last one did to its, and raises CaptureError
    when it has changed one: in eager code its caller would see that. Objects of all other classes are kept by identity,
    and held strongly: subclasses of list and dict, and what torch's pytree can take apart, have a behaviour of their
    own.
    """
    if any(map(_is_container, args)) or any(map(_is_container, kwargs.values())):
        args, kwargs = rebuilt((args, kwargs))
        return _FrozenCall(fn, *args, **kwargs)
    return partial(fn, *args, **kwargs)


class _FrozenCall(partial[Any]):
    """Call with containers that are rebuilt each time."""

    def __call__(self) -> Any:
        """Call the function, and see that it leaves its containers as they are."""
        known: dict[int, Any] = {}
        args, kwargs = _rebuilt((self.args, self.keywords), known)
        before = [(container, _items(container)) for container in known.values()]
        result = self.func(*args, **kwargs)
        for container, items in before:
            now = _items(container)
            if len(now) != len(items) or any(map(is_not, now, items)):
                raise CaptureError(
                    f"a break changed a {type(container).__name__} that it was given, which is its own: no segment and "
                    "no caller would see that. Return what is new, or pass an object of a class of your own"
                )
        return result


def rebuilt(tree: Any) -> Any:
    """Return ``tree`` with new lists, tuples and dicts, in any nesting; what is in it twice is so again."""
    return _rebuilt(tree, {})


def _rebuilt(tree: Any, known: dict[int, Any]) -> Any:
    if type(tree) in _CHANGEABLE:
        if id(tree) not in known:
            # Known before it is filled, as it may contain itself.
            known[id(tree)] = new = copy(tree)
            for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
                new[key] = _rebuilt(item, known)
        return known[id(tree)]
    if type(tree) is tuple:
        return tuple([_rebuilt(item, known) for item in tree])
    if _is_named_tuple(tree):
        return tree._make([_rebuilt(item, known) for item in tree])
    return tree


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _is_container(value: Any) -> bool:
    return type(value) in _CHANGEABLE or type(value) is tuple or _is_named_tuple(value)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")
