"""What the result of a break may consist of: containers that are taken apart, tensors, and plain values."""

from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Number
from typing import Any

import torch
from torch import Tensor

_PLAIN = (
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    Number,
)


def is_plain(value: Any) -> bool:
    """Tell whether ``value`` is one that the next segment may have baked in: known by itself, without attributes."""
    if isinstance(value, frozenset | set):
        return all(map(is_plain, value))
    return isinstance(value, Enum) or (
        isinstance(value, _PLAIN) and not getattr(value, "__dict__", None)
    )


def equal(one: Any, other: Any) -> bool:
    """Tell whether two plain values are the same to the segment that has one baked in.

    NaN is NaN. Not the same are 1 and 1.0 and True, whose products have other types, nor 0.0 and -0.0.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Number) and not isinstance(one, Integral):
        return repr(one) == repr(other)
    return bool(one == other)


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return what a list, tuple, dict or dataclass consists of, by key; None for anything else.

    Attributes are parts, also those that a dataclass does not declare.
    """
    attributes = {f".{name}": part for name, part in getattr(value, "__dict__", {}).items()}
    if isinstance(value, dict):
        return {**value, **attributes}
    if isinstance(value, list | tuple):
        return {**dict(enumerate(value)), **attributes}
    if is_dataclass(value) and not isinstance(value, type):
        slots = [field.name for field in fields(value) if hasattr(value, field.name)]
        return {f".{name}": getattr(value, name) for name in slots} | attributes
    return None


def layout_of(tensor: Tensor) -> str:
    """Name how the elements lie in memory; one word for what has no shape or strides to be asked for."""
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else str(tensor.layout)


def not_writable(tensor: Tensor) -> str | None:
    """Say why later results cannot be copied to where ``tensor`` is; None where they can."""
    layout = layout_of(tensor)
    if layout != str(torch.strided):
        return (
            f"a tensor of layout {layout}, which has no single place in memory: return a dense one"
        )
    if tensor.is_meta:
        return "a tensor on the meta device, which has no memory"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugate or negative view, which is not what its memory holds: call resolve_conj() and resolve_neg()"
    if _elements_share_memory(tensor):
        return "an expanded tensor, whose elements share memory: call contiguous() on it"
    return None


def _elements_share_memory(tensor: Tensor) -> bool:
    """Tell whether two elements may be at one address, as in expanded tensors and overlapping windows."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two strided tensors have an element of memory in common; marks each byte between, on the host."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    begin = max(one.data_ptr(), other.data_ptr())
    end = min(one.data_ptr() + _extent(one), other.data_ptr() + _extent(other))
    if begin >= end:
        return False
    first = min(one.data_ptr(), other.data_ptr())
    last = max(one.data_ptr() + _extent(one), other.data_ptr() + _extent(other))
    taken = torch.zeros(last - first, dtype=torch.bool, device="cpu")
    _bytes_of(taken, one, first).fill_(True)
    return bool(_bytes_of(taken, other, first).any())


def _extent(tensor: Tensor) -> int:
    """Return how many bytes lie from the first element to the end of the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.element_size() * (1 + sum(stride * (size - 1) for stride, size in steps))


def _bytes_of(marks: Tensor, tensor: Tensor, first: int) -> Tensor:
    """View the bytes of ``tensor`` in ``marks``, which has an element for each byte from address ``first`` on."""
    size = tensor.element_size()
    return marks.as_strided(
        (*tensor.shape, size),
        (*(stride * size for stride in tensor.stride()), 1),
        tensor.data_ptr() - first,
    )
