"""What a break is called with: containers as they were at the call, everything else by identity."""

from collections.abc import Callable
from functools import partial
from typing import Any


def frozen_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> partial[Any]:
    """Return a call of ``fn`` that knows nothing of later changes to lists, tuples and dicts among its arguments.

    Each call gets containers of its own, so that it does not see what the last one did to its. Subclasses of list and
    dict are objects with a behaviour of their own, and are kept by identity; named tuples are rebuilt.
    """
    if any(map(_is_container, args)) or any(map(_is_container, kwargs.values())):
        return _FrozenCall(fn, *rebuilt(args), **rebuilt(kwargs))
    return partial(fn, *args, **kwargs)


class _FrozenCall(partial[Any]):
    """Call with containers that are rebuilt each time."""

    def __call__(self) -> Any:
        """Call the function."""
        args, kwargs = rebuilt((self.args, self.keywords))
        return self.func(*args, **kwargs)


def rebuilt(tree: Any) -> Any:
    """Return ``tree`` with new lists, tuples and dicts, in any nesting; what is in it twice is so again."""
    return _rebuilt(tree, {})


def _rebuilt(tree: Any, known: dict[int, Any]) -> Any:
    kind = type(tree)
    if kind is list:
        if id(tree) not in known:
            # Known before it is filled, as it may contain itself.
            known[id(tree)] = items = list[Any]()
            items += [_rebuilt(item, known) for item in tree]
        return known[id(tree)]
    if kind is dict:
        if id(tree) not in known:
            known[id(tree)] = entries = dict[Any, Any]()
            entries.update({key: _rebuilt(value, known) for key, value in tree.items()})
        return known[id(tree)]
    if kind is tuple:
        return tuple([_rebuilt(item, known) for item in tree])
    if _is_named_tuple(tree):
        return tree._make([_rebuilt(item, known) for item in tree])
    return tree


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, tuple) or _is_named_tuple(value)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")
