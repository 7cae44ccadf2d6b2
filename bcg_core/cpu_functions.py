"""Calls of torch's functions inside a segment that operations do not show, or show as a CPU would do them."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bcg_core.cpu_host_reads import host_read
from bcg_core.errors import CaptureError
from bcg_core.modes import OwnMode

_READS = frozenset(
    {
        Tensor.tolist,
        Tensor.numpy,
        Tensor.cpu,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__repr__,
        Tensor.__format__,
    }
)
_FROM_HOST = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class Recorder(Protocol):
    """Record a segment, and take what makes it invalid."""

    @property
    def recording(self) -> bool:
        """Tell whether a segment is open."""

    def refuse(self, error: CaptureError) -> CaptureError:
        """Make the segment invalid because of ``error``, and return that for raising."""


class FunctionGuard(OwnMode, TorchFunctionMode):
    """See the calls of torch's functions in a segment.

    Host reads that never become an operation are refused, as ``.tolist()`` is, and so is host data that is copied to
    the device. ``one_hot`` is done as on CUDA: a CPU would look at the largest class.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse or replace a call inside a segment, pass everything else on."""
        kwargs = kwargs or {}
        if self._recorder.recording:
            if func in _READS:
                raise self._recorder.refuse(host_read(f"Tensor.{getattr(func, '__name__', func)}"))
            if _copies_from_host(func, (*args, *kwargs.values())):
                raise self._recorder.refuse(
                    CaptureError(
                        "host data became a tensor on the device inside a segment (torch.tensor with a device, "
                        "new_tensor): its values would be frozen at capture, and the copy waits for the device; make "
                        "the tensor before, use torch.full, or leave the device out"
                    )
                )
            if func is torch.nn.functional.one_hot:
                return _one_hot(*args, **kwargs)
        return func(*args, **kwargs)


def _copies_from_host(func: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    """Tell whether a tensor is made on the device of what is none.

    A device by name may mean the host also where tensors live elsewhere; an object is that of another tensor.
    """
    tensors = sum(isinstance(value, Tensor) for value in given)
    if func is Tensor.new_tensor:
        return tensors == 1
    on_device = any(isinstance(value, torch.device) for value in given)
    return func in _FROM_HOST and on_device and not tensors


def _one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 1 or input.dtype != torch.int64:
        # Looks at the largest class on every device, or is no call that any accepts.
        return torch.nn.functional.one_hot(input, num_classes)
    shape = (*input.shape, num_classes)
    zeros = torch.zeros(shape, dtype=input.dtype, device=input.device)
    return zeros.scatter_(-1, input.unsqueeze(-1), 1)
