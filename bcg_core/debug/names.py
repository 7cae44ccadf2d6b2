"""Names for tensors: what a person would write to reach them."""

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor

_LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device),
    *(ModuleType, FunctionType, MethodType, BuiltinFunctionType),
)
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a ``torch.nn.Module`` that hold what is written without them."""


def tensors_below(owner: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that ``owner`` holds, however deep, each with the expression that reaches it from ``name``.

    Follows attributes, slots, mappings, lists and tuples, and whatever these hold; functions and modules hold nothing
    here. Each object is followed once, so that a cycle ends.
    """
    return _walk(owner, name, set())


def weights_below(owner: object) -> Iterator[tuple[str, Tensor]]:
    """Yield what objects below ``owner`` call their weights: the pairs that their ``named_tensors()`` yields."""
    for holder in _objects(owner, set()):
        listed = getattr(holder, "named_tensors", None)
        if callable(listed):
            yield from listed()


def _walk(value: object, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif not isinstance(value, _LEAVES) and id(value) not in seen:
        seen.add(id(value))
        for step, held in _steps(value):
            yield from _walk(held, name + step, seen)


def _objects(value: object, seen: set[int]) -> Iterator[object]:
    if isinstance(value, (Tensor, *_LEAVES)) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for _, held in _steps(value):
        yield from _objects(held, seen)


def _steps(value: object) -> Iterator[tuple[str, object]]:
    """Yield what ``value`` holds, each with what is written to get there."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", held) for index, held in enumerate(value))
    else:
        yield from _attributes(value)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    for attribute, held in getattr(value, "__dict__", {}).items():
        if isinstance(value, torch.nn.Module) and attribute in _REGISTRIES:
            yield from ((f".{key}", entry) for key, entry in held.items())
        else:
            yield f".{attribute}", held
    for slot in getattr(type(value), "__slots__", ()):
        if hasattr(value, slot):
            yield f".{slot}", getattr(value, slot)
