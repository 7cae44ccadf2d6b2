"""What a break was given at capture, and gets again at every replay."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils import _pytree as pytree


def frozen_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    """Return a call of ``fn`` with the arguments as they are now: what happens to their containers later is not seen.

    Lists, tuples and dicts are made anew for each call, so that none sees what another did to them. Everything in them
    is kept by identity, and held strongly.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if _same((*args, *kwargs.values()), leaves):
        # Without containers there is nothing to make anew, and nothing to pay at replays.
        return partial(fn, *args, **kwargs)
    return partial(_call, fn, leaves, structure)


def _same(arguments: tuple[Any, ...], leaves: list[Any]) -> bool:
    return len(arguments) == len(leaves) and all(map(lambda a, b: a is b, arguments, leaves))


def _call(fn: Callable[..., Any], leaves: list[Any], structure: pytree.TreeSpec) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return fn(*args, **kwargs)
