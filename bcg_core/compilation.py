"""``torch.compile`` around a caller: it would look into every call, and compile what it finds there.

Not ``torch.compiler.disable``, which imports the compiler, two seconds' work, into processes that compile nothing.
"""

from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

from bcg_core.errors import AmbientStateError

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` run ``function``, and all that it calls, as it is; a call costs nothing more.

    What is compiled on purpose further down still is.
    """
    return _marked(function, callees=_FrameAction.SKIP)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` call ``function`` rather than trace it, so that it can ``refuse_compilation``."""
    return _marked(function, callees=_FrameAction.DEFAULT)


def _marked(function: Callable[P, R], *, callees: _FrameAction) -> Callable[P, R]:
    code = cast("FunctionType", function).__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, callees))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # as torch.compiler.disable does
    return function


def refuse_compilation(what: str) -> None:
    """Raise AmbientStateError where ``torch.compile`` compiles the functions that are called at the moment."""
    if get_eval_frame_callback() is not None:
        raise AmbientStateError(
            f"{what} inside a function that torch.compile compiles: pieces of what is captured would be compiled as "
            "well. Put torch.compiler.disable on the function that captures; what is compiled on its own may be "
            "called in a capture"
        )
