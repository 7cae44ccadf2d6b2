"""Breaks: ordinary Python between two captured segments.

A function marked with ``eager_on_graph`` is a plain call until it is reached inside a capture. There it ends the
segment at hand, runs, is recorded, and begins the next segment.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import update_wrapper
from types import MethodType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")


class BreakRecorder(Protocol):
    """Take a break that was reached inside a capture."""

    def record_break(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``fn`` between two segments, record it, and return its result."""


active_recorder: ContextVar[BreakRecorder | None] = ContextVar("bcg_active_recorder", default=None)
"""The capture that this thread of execution is inside of, if any."""


class Break(Generic[P, R]):
    """Wrap a function so that a capture runs it between segments.

    Attributes:
        name: what errors and debuggers call this break.
        fn: the wrapped function.
    """

    def __init__(self, fn: Callable[P, R], name: str) -> None:
        self.fn = fn
        self.name = name
        update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``fn``; inside a capture, as a break."""
        recorder = active_recorder.get()
        if recorder is None:
            return self.fn(*args, **kwargs)
        return cast("R", recorder.record_break(self.name, self.fn, args, kwargs))

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """Bind to ``instance`` as a function would, so that methods can be breaks."""
        return self if instance is None else MethodType(self, instance)


@overload
def eager_on_graph(fn: Callable[P, R], /) -> Break[P, R]: ...
@overload
def eager_on_graph(*, name: str) -> Callable[[Callable[P, R]], Break[P, R]]: ...
def eager_on_graph(
    fn: Callable[P, R] | None = None, /, *, name: str | None = None
) -> Break[P, R] | Callable[[Callable[P, R]], Break[P, R]]:
    """Mark a function as a break; usable bare or as ``@eager_on_graph(name="...")``.

    Arguments are frozen at capture: tensors by address, held strongly for the life of the graph; lists, tuples and
    dicts, in any nesting, as they are at the call; everything else by identity. So live state belongs into an object
    with attributes, which is passed by identity, or into tensors that are updated in place; never into a list or a
    dict. Each call, that of the capture too, gets containers of its own: what a break does to them is seen neither by
    its next call nor by its caller. Tensors that the function returns keep the address they had at capture: at replay the new result is checked
    (structure, shape, dtype, device) and copied there. Anything else it returns must be equal to what it returned at
    capture. What it leaves elsewhere (attributes, lists) is invisible to later segments.

    Nested in another break it runs inline; in eager code it is a plain call. At capture it runs once, on memory that
    no segment has computed yet.
    """

    def mark(function: Callable[P, R]) -> Break[P, R]:
        return Break(function, name or str(getattr(function, "__qualname__", function)))

    return mark if fn is None else mark(fn)


@eager_on_graph
def break_graph() -> None:
    """End the segment at hand and begin the next; an empty break."""
