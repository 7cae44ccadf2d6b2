"""Breaks: ordinary Python between two captured segments.

A function marked with ``eager_on_graph`` is a plain call until it is reached inside a capture. There it ends the
segment at hand, runs, is recorded, and begins the next segment.
"""

import threading
from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")


class BreakRecorder(Protocol):
    """Take a break that was reached inside a capture."""

    @property
    def in_break(self) -> bool:
        """Tell whether a break runs right now, so that nothing is recorded."""

    def record_break(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``fn`` between two segments, record it, and return its result."""


class ActiveRecorder(threading.local):
    """Know the capture that this thread is inside of, if any.

    No context variable: contexts are copied (by tasks, callbacks, executors), and a copy that was made in a break would
    be inside the capture for good, in other threads too. What is recorded is a thread's work.
    """

    recorder: BreakRecorder | None = None
    """The capture. Set as an attribute, not by a call: calls are where interrupts come in."""

    def get(self) -> BreakRecorder | None:
        """Return the capture, or None outside of one."""
        return self.recorder


active_recorder = ActiveRecorder()
"""The capture that each thread is inside of."""


def is_capturing() -> bool:
    """Tell whether what this thread asks of the device is recorded instead of done.

    True in a segment of a capture, and in the functions of breaks that a capture with ``inline_breaks`` makes part of
    it. False in a break, at capture too, since its work is done; at replays, in eager code, and in other threads.
    Within a capture of this library it agrees with ``torch.cuda.is_current_stream_capturing``.
    """
    recorder = active_recorder.get()
    return recorder is not None and not recorder.in_break


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
def eager_on_graph(
    *, name: str | None = None, enable: Literal[True] = True
) -> Callable[[Callable[P, R]], Break[P, R]]: ...
@overload
def eager_on_graph(
    *, name: str | None = None, enable: bool
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def eager_on_graph(
    fn: Callable[P, R] | None = None, /, *, name: str | None = None, enable: bool = True
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as a break; usable bare or as ``@eager_on_graph(name="...")``.

    Arguments are frozen at capture: tensors by address, held strongly for the life of the graph; lists, tuples and
    dicts as they were, however deep; everything else (also sets, dataclasses and your subclasses of list) by identity.
    So live state belongs into an object of a class of your own, which is passed by identity, or into tensors that are
    updated in place. A call gets new lists, tuples and dicts each time, at capture too, and raises CaptureError when it
    has changed one: its caller would not see that.

    The function may return tensors, plain values (numbers, text, None, enumerations, dtypes, devices) and tuples,
    lists, dicts, sets and dataclasses of them. Tensors keep the address they had at capture: at replay the new ones are
    checked (structure, shape, dtype, device) and copied there. Plain values must be equal to those at capture. Any
    other object is refused at capture, even one that is the same at every replay: nobody looks at its attributes again.
    What a break leaves elsewhere (attributes, lists) is invisible to later segments.

    Nested in another break it runs inline; in eager code it is a plain call. At capture it runs once, on memory that
    no segment has computed yet. In a break another graph may be replayed (``eager_on_graph(other.replay)``), if it is
    of another engine; no capture can be started.

    Args:
        fn: the function.
        name: what errors and debuggers call the break; default is the function's own name.
        enable: False returns the function as it is: it becomes part of the segment.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        if not enable:
            return function
        if not callable(function):
            raise TypeError(
                f"{function!r} cannot be called: mark a function, or switch the mark with eager_on_graph(enable=...)"
            )
        return Break(function, name or str(getattr(function, "__qualname__", function)))

    return mark if fn is None else mark(fn)


@eager_on_graph
def break_graph() -> None:
    """End the segment at hand and begin the next; an empty break."""
