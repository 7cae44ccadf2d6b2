"""What the result of a break may consist of: containers that are taken apart, tensors, and plain values."""

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    Enum,
)


def is_plain(value: Any) -> bool:
    """Tell whether ``value`` is one that cannot change, so that the next segment may have it baked in."""
    if isinstance(value, frozenset | set):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


def equal(one: Any, other: Any) -> bool:
    """Tell whether two plain values are the same to the segment that has one baked in; NaN is NaN."""
    return bool(one == other) or bool(one != one and other != other)


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return what a list, tuple, dict or dataclass consists of, by key; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def not_writable(tensor: Tensor) -> str | None:
    """Say why later results cannot be copied to where ``tensor`` is; None where they can."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}, which has no single place in memory: return a dense one"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no memory"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugate or negative view, which is not what its memory holds: call resolve_conj() and resolve_neg()"
    if torch._debug_has_internal_overlap(tensor) == 1:
        return "an expanded tensor, whose elements share memory: call contiguous() on it"
    return None


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two strided tensors have an element of memory in common."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    taken = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    _bytes_of(taken, one).fill_(True)
    return bool(_bytes_of(taken, other).any())


def _bytes_of(storage: Tensor, tensor: Tensor) -> Tensor:
    """View the bytes of ``tensor`` in ``storage``, which has an element for each byte."""
    size = tensor.element_size()
    return storage.as_strided(
        (*tensor.shape, size),
        (*(stride * size for stride in tensor.stride()), 1),
        tensor.storage_offset() * size,
    )
