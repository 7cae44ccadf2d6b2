"""The operands of an ATen operation: what its schema says of them, and how to hold on to where they lie."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

Func = OpOverload[..., Any]


def pinned(tensor: Tensor) -> Tensor:
    """Return an alias that stays at this address and geometry, whatever becomes of ``tensor``, and holds the memory.

    To be called below autograd, as dispatch modes are: the alias has no history and no version to check.
    """
    alias: Tensor = torch.ops.aten.alias.default(tensor)
    return alias


def decomposes(func: Func) -> bool:
    """Tell whether ``func`` is made of other operations on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def is_view(func: Func) -> bool:
    """Tell whether ``func`` is declared to return an alias of an operand, which it does not write."""
    schema = func._schema
    return not schema.is_mutable and any(ret.alias_info is not None for ret in schema.returns)


def share_storage(result: Any, operands: Any) -> bool:
    """Tell whether all memory of ``result`` is that of ``operands``."""
    return _storages(result) <= _storages(operands)


def mutated(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """List the tensors that ``func`` writes in place."""
    operands = [value for argument, value in _bound(func, args, kwargs) if _written_alias(argument)]
    return [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, Tensor)]


def returned_operands(
    func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Tensor]:
    """Map result positions to the operands that ``func`` writes and returns there."""
    operands = {_written_alias(argument): value for argument, value in _bound(func, args, kwargs)}
    aliases = [_written_alias(result) for result in func._schema.returns]
    return {position: operands[alias] for position, alias in enumerate(aliases) if alias}


def _bound(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Pair the schema's arguments with the operands given for them."""
    schema = func._schema.arguments
    pairs = list(zip(schema, args, strict=False))
    return pairs + [
        (argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs
    ]


def _written_alias(argument: Any) -> frozenset[str] | None:
    """Return the alias set of a schema argument or result that is written, None for all others."""
    info = argument.alias_info
    return frozenset(info.before_set) if info is not None and info.is_write else None


def _storages(tree: Any) -> set[int]:
    return {
        leaf.untyped_storage()._cdata
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor)
    }
