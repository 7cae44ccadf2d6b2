"""What the caller has switched on in torch around a call: put aside for its duration, or refused by name.

Autocast, the default device and the modes are the thread's; the default type is the process's, and other threads see
float32 while a call puts another one aside. Whatever a call finds, it leaves.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from bcg_core.compilation import uncompiled
from bcg_core.modes import refuse_modes

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Ambient:
    """Say what torch does to operations and factory functions that do not say it themselves.

    Attributes:
        autocast: device types that autocast is on for, each with its type.
        device: the default device; None where torch was given none.
        dtype: the default type.
    """

    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32

    @classmethod
    def now(cls) -> "Ambient":
        """Return what is on at the moment."""
        if _is_clean():
            return CLEAN
        modes = _get_current_function_mode_stack()
        return cls(
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in _AUTOCAST
                if torch.is_autocast_enabled(kind)
            ),
            device=next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None),
            dtype=torch.get_default_dtype(),
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Switch to this state inside, and back afterwards."""
        types = dict(self.autocast)
        with ExitStack() as stack:
            for kind in _AUTOCAST:
                if kind in types or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(
                            kind,
                            dtype=types.get(kind),
                            enabled=kind in types,
                            cache_enabled=False,  # what is cast belongs to the caller, who may hold it for long
                        )
                    )
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            stack.enter_context(_default_device(self.device))
            yield

    def around(self, call: Callable[[], R]) -> Callable[[], R]:
        """Return ``call`` as it is where nothing is on, and otherwise a call of it in this state."""
        return call if self == CLEAN else _Within(self, call)


CLEAN: Final = Ambient()
"""What torch starts with."""


class _Within:
    """Call something in a state that was kept."""

    def __init__(self, state: Ambient, call: Callable[[], Any]) -> None:
        self._state = state
        self._call = call

    def __call__(self) -> Any:
        with self._state.applied():
            return self._call()


def neutral(what: str) -> AbstractContextManager[None]:
    """Return a context in which torch is as it starts; raises AmbientStateError at once under a mode of the caller.

    Costs a few flag checks, well below a microsecond, where nothing is on. Grad and inference mode, the stream, anomaly
    mode and deterministic algorithms stay as they are: they change no bits of what is recorded and computed here.

    Args:
        what: the call that is made, for the message.
    """
    if _is_clean():
        return _NOTHING
    refuse_modes(what)
    return CLEAN.applied()


def neutrally(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function that makes things for later in ``neutral(what)``, outside inference mode, and uncompiled.

    A tensor that is made in inference mode could not be written outside of it.
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with neutral(what), ordinary_tensors():
                return function(*args, **kwargs)

        return uncompiled(call)

    return mark


def ordinary_tensors() -> AbstractContextManager[None]:
    """Return a context in which no inference tensors are made."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Have autocast cast anew at each use inside.

    A cast that it remembers from before a capture is freed under the graph, and one from inside is memory of the graph
    that nothing has computed yet.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


def _is_clean() -> bool:
    return not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or torch.get_default_dtype() is not torch.float32
    )


@contextmanager
def _default_device(device: torch.device | None) -> Iterator[None]:
    """Make ``device`` the default one inside.

    Not through ``torch.set_default_device``, which drops the ``with torch.device(...)`` that it is called in.
    """
    asked = torch._GLOBAL_DEVICE_CONTEXT
    context, modes = getattr(asked, "device_context", None), _get_current_function_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
    # Where torch keeps it, too: at the bottom.
    _replace_modes(others if device is None else [DeviceContext(device), *others])
    asked.device_context = None
    try:
        yield
    finally:
        asked.device_context = context
        _replace_modes(modes)


def _replace_modes(modes: list[Any]) -> None:
    """Make ``modes``, from the outermost on, the function modes of this thread."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
