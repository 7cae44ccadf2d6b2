"""Host reads inside a segment: the operations and methods that make CUDA wait for a value, and the refusal."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bcg_core.cpu_operands import Func
from bcg_core.errors import CaptureError, HostReadError

_aten = torch.ops.aten
_READING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
# Methods that never become an operation.
_METHODS = frozenset(
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
# Read an operand on the host on CUDA, and are not tagged for it.
_UNTAGGED = frozenset(
    {
        _aten._linalg_check_errors.default,
        _aten._linalg_eigh.default,
        _aten._linalg_eigvals.default,
        _aten._linalg_svd.default,
        _aten.embedding_renorm_.default,
        _aten.linalg_eig.default,
        _aten.linalg_matrix_exp.default,
        _aten.normal.Tensor_Tensor,
        _aten.normal.float_Tensor,
    }
)


def host_read(what: str) -> HostReadError:
    """Return the refusal of ``what``, which reads a value on the host."""
    return HostReadError(
        f"{what} reads a device value on the host inside a segment: the value does not exist at capture and would be "
        "frozen at replay. Move it into a break (eager_on_graph), or keep the computation on the device"
    )


def refused_read(
    func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HostReadError | None:
    """Return the refusal of an operation that would read an operand on the host on CUDA, None for all others."""
    if func in _INDEXING:
        by_mask = _indexes_by_mask(func, args)
        return host_read(f"{func.name()} with a boolean mask") if by_mask else None
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return None
    if func is _aten.histc.default:
        _, _, low, high = _histogram(*args, **kwargs)
        return host_read(f"{func.name()} without a range") if low == high else None
    if func in _UNTAGGED or _READING_TAGS & set(func.tags):
        return host_read(func.name())
    return None


def _histogram(
    x: Tensor, bins: int = 100, min: float = 0, max: float = 0
) -> tuple[Tensor, int, float, float]:
    return x, bins, min, max


def _indexes_by_mask(func: Func, args: tuple[Any, ...]) -> bool:
    """Tell whether the elements that a mask selects would be counted on the host."""
    indices = [index for index in args[1] if index is not None]
    by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    # Setting one mask's elements to a number is a masked fill, which needs no count; accumulating is none.
    fills = (
        func is not _aten.index.Tensor
        and len(indices) == 1
        and args[2].dim() == 0
        and not any(args[3:])
    )
    return by_mask and not fills


class Recorder(Protocol):
    """Record a segment, and take what makes it invalid."""

    @property
    def recording(self) -> bool:
        """Tell whether a segment is open."""

    def refuse(self, error: CaptureError) -> CaptureError:
        """Make the segment invalid because of ``error``, and return that for raising."""


class HostReadGuard(TorchFunctionMode):
    """Catch the host reads that never become an ATen operation, as ``.tolist()`` does not."""

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
        """Refuse a host read inside a segment, pass everything else on."""
        if self._recorder.recording and func in _METHODS:
            raise self._recorder.refuse(host_read(f"Tensor.{getattr(func, '__name__', func)}"))
        return func(*args, **(kwargs or {}))
