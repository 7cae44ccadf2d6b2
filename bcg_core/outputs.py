"""What a break returned at capture, and how later results are put in its place."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_core.errors import BreakOutputError


class FrozenOutput:
    """Keep the result of a break as it was at capture: the next segment has its addresses recorded.

    Tensors are held strongly, in any nesting of tuples, lists and dicts.
    """

    def __init__(self, name: str, result: Any) -> None:
        self._name = name
        self._is_none = result is None
        self._leaves, self._structure = pytree.tree_flatten(result)

    def accept(self, result: Any) -> None:
        """Copy the tensors of ``result`` to the captured addresses; those that are there already stay.

        Raises BreakOutputError, before anything is copied, when structure, shapes, dtypes or devices differ, or a value
        that is no tensor differs from the captured one, which the next segment has baked in.
        """
        if result is None and self._is_none:
            return
        leaves, structure = pytree.tree_flatten(result)
        if structure != self._structure:
            raise self._difference("structure", self._structure, structure)
        for captured, new in zip(self._leaves, leaves, strict=True):
            self._check(captured, new)
        moves = [
            (captured, new)
            for captured, new in zip(self._leaves, leaves, strict=True)
            if isinstance(captured, Tensor) and not _same_memory(captured, new)
        ]
        written = {captured.untyped_storage().data_ptr() for captured, _ in moves}
        # Captured tensors may be inference tensors, whatever the mode is now.
        with torch.inference_mode():
            # What lies where another result goes (two buffers swapped, say) is saved before that is written.
            sources = [
                new.clone() if new.untyped_storage().data_ptr() in written else new
                for _, new in moves
            ]
            for (captured, _), source in zip(moves, sources, strict=True):
                captured.copy_(source)

    def _check(self, captured: Any, new: Any) -> None:
        if not isinstance(captured, Tensor):
            if isinstance(new, Tensor) or (captured is not new and captured != new):
                raise self._difference("value", captured, new)
            return
        if not isinstance(new, Tensor):
            raise self._difference("type", "a tensor", type(new).__name__)
        for what in ("shape", "dtype", "device"):
            if getattr(captured, what) != getattr(new, what):
                raise self._difference(what, getattr(captured, what), getattr(new, what))

    def _difference(self, what: str, captured: Any, new: Any) -> BreakOutputError:
        return BreakOutputError(
            f"break {self._name!r} returned another {what} than at capture: {new} instead of {captured}. "
            "The segment after it reads what was captured; return the same kind of result for every batch"
        )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())
