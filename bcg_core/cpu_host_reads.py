"""Host reads inside a segment: the operations that make CUDA wait for a value, and the refusal."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from bcg_core.cpu_operands import Func
from bcg_core.errors import HostReadError

_aten = torch.ops.aten
_READING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# Read an operand on the host on CUDA, and are not tagged for it.
_UNTAGGED = frozenset(
    {
        _aten._linalg_check_errors.default,
        _aten._linalg_eigh.default,
        _aten._linalg_eigvals.default,
        _aten._linalg_svd.default,
        _aten._to_sparse.default,
        _aten.linalg_eig.default,
        _aten.linalg_matrix_exp.default,
        _aten.linalg_pinv.atol_rtol_tensor,
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


def refused_read(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HostReadError | None:
    """Return the refusal of an operation that would read an operand on the host on CUDA, None for all others."""
    depends = _DEPENDING.get(func)
    if depends is not None:
        case = depends(*args, **kwargs)
        return host_read(f"{func.name()} {case}") if case else None
    if func in _UNTAGGED or _READING_TAGS & set(func.tags):
        return host_read(func.name())
    return None


def _index(_: Tensor, indices: Sequence[Tensor | None]) -> str | None:
    return "with a boolean mask" if _has_mask(indices) else None


def _index_put(
    _: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> str | None:
    # Setting one mask's elements to a number is a masked fill, which needs no count; accumulating is none.
    given = [index for index in indices if index is not None]
    fills = len(given) == 1 and values.dim() == 0 and not accumulate
    return "with a boolean mask" if _has_mask(given) and not fills else None


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    """Tell whether the elements that a mask selects would be counted."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _repeat_interleave(_: Tensor, *, output_size: int | None = None) -> str | None:
    return "without output_size" if output_size is None else None


def _histc(_: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> str | None:
    return "without a range" if min == max else None


def _isin(
    elements: Tensor, among: Tensor, *, assume_unique: bool = False, invert: bool = False
) -> str | None:
    # From there on CUDA sorts, and drops duplicates first, which it counts.
    sorts = among.numel() >= int(10 * elements.numel() ** 0.145)
    return "of so many elements" if sorts and not assume_unique else None


_DEPENDING: Mapping[Func, Callable[..., str | None]] = MappingProxyType(
    {
        _aten.histc.default: _histc,
        _aten.index.Tensor: _index,
        _aten.index_put.default: _index_put,
        _aten.index_put_.default: _index_put,
        _aten.isin.Tensor_Tensor: _isin,
        _aten.repeat_interleave.Tensor: _repeat_interleave,
    }
)
"""Operations whose operands decide, and what to say of the case in which they read."""
