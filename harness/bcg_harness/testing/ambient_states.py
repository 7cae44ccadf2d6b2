"""States of torch that a caller may be in, each as a way to make a call, and how to compare them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

R = TypeVar("R")
State = Callable[[Callable[[], Any]], Any]
"""Makes a call in that state, and returns its result."""


class SeesOperations(TorchDispatchMode):
    """Run everything as it is, below the dispatcher."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass on."""
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    """Run everything as it is, above the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass on."""
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """Set the default device of the thread inside."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default type of the process inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """Demand deterministic algorithms of the process inside."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def within(*contexts: Callable[[], AbstractContextManager[Any]]) -> State:
    """Return the state of being in these contexts."""

    def run(call: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return call()

    return run


def compiled(call: Callable[[], R]) -> R:
    """Make ``call`` in a function that torch.compile compiles; raises where any part of the call would be compiled."""

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise AssertionError(f"torch.compile compiles what a call does:\n{graph.code}")

    around: Callable[[], R] = torch.compile(lambda: call(), backend=compiler)
    try:
        return around()
    finally:
        torch.compiler.reset()


PUT_ASIDE: Mapping[str, State] = MappingProxyType(
    {
        "autocast_bfloat16": within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        "autocast_float16": within(lambda: torch.autocast("cpu", dtype=torch.float16)),
        "set_default_device": within(lambda: default_device("meta")),
        "with_device": within(lambda: torch.device("meta")),
        "device_in_device": within(lambda: default_device("meta"), lambda: torch.device("cpu")),
        "default_float64": within(lambda: default_dtype(torch.float64)),
        "default_bfloat16": within(lambda: default_dtype(torch.bfloat16)),
        "anomaly_mode": within(lambda: torch.autograd.set_detect_anomaly(True)),
        "deterministic": within(lambda: deterministic(warn_only=False)),
        "deterministic_warn_only": within(lambda: deterministic(warn_only=True)),
        "inference_mode": within(torch.inference_mode),
        "no_grad": within(torch.no_grad),
        "enable_grad": within(torch.enable_grad),
        "all_at_once": within(
            lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            lambda: default_device("meta"),
            lambda: default_dtype(torch.float64),
            torch.inference_mode,
        ),
        "torch_compile": compiled,
    }
)
"""What a call puts aside, or what does not concern it: results have the bits of a call without."""

MODES: Mapping[str, State] = MappingProxyType(
    {
        "FlopCounterMode": within(lambda: FlopCounterMode(display=False)),
        "SeesOperations": within(SeesOperations),
        "SeesFunctions": within(SeesFunctions),
        "FakeTensorMode": within(FakeTensorMode),
    }
)
"""What a call refuses, by the name that the refusal has."""


def fingerprint() -> dict[str, object]:
    """Return everything that a call might leave changed in this thread or process."""
    return {
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "function modes": _get_current_function_mode_stack(),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "inference mode": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }
