"""Whose turn it is to use a runner's memory: one call at a time, whichever thread it comes from."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from threading import get_ident
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

from bcg_core.compilation import uncompiled
from bcg_core.errors import RunnerBusyError
from bcg_core.runner_checks import check_not_capturing

Threads = Literal["wait", "refuse"]
"""What becomes of a call while another thread's runs."""

_MEMORY = "static inputs, boundary buffers, hidden states and graph memory"

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """Let the calls of one owner run one at a time.

    Args:
        threads: ``"wait"`` lets another thread wait until the turn is free, ``"refuse"`` refuses it.
        before: called at the beginning of each turn.

    Raises ValueError for another word.
    """

    def __init__(self, threads: Threads, before: Callable[[], None]) -> None:
        if threads not in ("wait", "refuse"):
            raise ValueError(
                f"threads is {threads!r}: use 'wait', so that a thread waits for its turn, or 'refuse'"
            )
        self._queue: AbstractContextManager[object] = (
            threading.Lock() if threads == "wait" else nullcontext()
        )
        self._before = before
        # One entry at most. A dict, because setdefault() looks and takes in one step, which neither another thread nor
        # an interrupt can cut in two.
        self._held: dict[str, tuple[str, int]] = {}

    def run(self, name: str, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``method`` when it is its turn; ``name`` is what errors call it. The turn is free afterwards.

        Raises RunnerBusyError inside a call of this owner, and where another thread's runs and is not waited for;
        NestedCaptureError inside a capture, before it waits for anybody.
        """
        turn = (name, get_ident())
        held = self._held.get("turn")
        if held is not None and held[1] == turn[1]:
            raise RunnerBusyError(
                f"{name} was called inside {held[0]} of the same runner, whose memory is in use ({_MEMORY}): call it "
                "when that has returned, or use another runner"
            )
        check_not_capturing(name)
        with self._queue:
            try:
                held = self._held.setdefault("turn", turn)
                if held is not turn:
                    raise RunnerBusyError(
                        f"{name} was called in thread {_thread(turn[1])} during {held[0]} of the same runner in thread "
                        f"{_thread(held[1])}, whose memory is in use ({_MEMORY}): call it when that has returned, make "
                        "the runner with threads='wait', or use another runner"
                    )
                self._before()
                return method(*args, **kwargs)
            finally:
                if self._held.get("turn") is turn:
                    del self._held["turn"]


class _Owner(Protocol):
    _turns: Turns


S = TypeVar("S", bound=_Owner)


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make ``method`` of an owner of turns wait for its turn, or refuse; errors as in ``Turns.run``."""
    name = method.__name__

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._turns.run(name, method, self, *args, **kwargs)

    return uncompiled(run)


def _thread(ident: int) -> str:
    """Return the name of a thread, or its number where it has none any more."""
    names = {thread.ident: repr(thread.name) for thread in threading.enumerate()}
    return names.get(ident, str(ident))
