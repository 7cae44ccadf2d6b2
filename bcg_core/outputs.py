"""What a break returned at capture, and how later results are put in its place."""

from collections.abc import Iterator
from itertools import combinations
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from bcg_core.errors import BreakOutputError
from bcg_core.result_parts import equal, is_plain, layout_of, not_writable, overlap, parts_of


class FrozenOutput:
    """Keep the result of a break as it was at capture: the next segment has its addresses recorded.

    Tensors are held strongly, in any nesting of tuples, lists, dicts and dataclasses.

    Raises BreakOutputError for what later results cannot be put in place of: objects, whose attributes nobody looks at
    again, tensors that are not what their memory holds, and tensors that overlap.
    """

    def __init__(self, name: str, result: Any) -> None:
        self._name = name
        self._is_none = result is None
        try:
            self._result = self._kept(result)
        except RecursionError:
            raise self._refusal("a container that contains itself") from None
        self._twins = self._same_pairs(
            [leaf for leaf, _ in self._pairs(self._result, self._result)]
        )

    def accept(self, result: Any) -> None:
        """Copy the tensors of ``result`` to the captured addresses; those that are there already stay.

        Raises BreakOutputError, before anything is copied, when structure, shapes, dtypes or devices differ, or a value
        that is no tensor differs from the captured one, which the next segment has baked in.
        """
        if result is None and self._is_none:
            return
        pairs = list(self._pairs(self._result, result))
        for one, other in self._twins:
            if not _same_memory(pairs[one][1], pairs[other][1]):
                raise self._difference("structure", "one tensor twice", "two tensors")
        moves = [(captured, new) for captured, new in pairs if not _same_memory(captured, new)]
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

    def _kept(self, value: Any) -> Any:
        """Return ``value`` with containers of our own, which nobody changes."""
        if isinstance(value, Tensor):
            if (reason := not_writable(value)) is not None:
                raise self._refusal(reason)
            return value
        if is_plain(value):
            # A set that the break goes on to fill would always be equal to itself.
            return set(value) if isinstance(value, set) else value
        parts = parts_of(value)
        if parts is None:
            raise self._refusal(
                f"an object of {type(value).__module__}.{type(value).__qualname__}, whose later state no segment "
                "would see: return tensors, numbers, text, and tuples, lists, dicts or dataclasses of them"
            )
        return _Container(type(value), {key: self._kept(part) for key, part in parts.items()})

    def _same_pairs(self, tensors: list[Tensor]) -> list[tuple[int, int]]:
        """Return which of the tensors are the same memory; refuses those that overlap in part."""
        same = []
        for (i, one), (j, other) in combinations(enumerate(tensors), 2):
            if _same_memory(one, other):
                same.append((i, j))
            elif overlap(one, other):
                raise self._refusal(
                    f"two tensors that share some of their memory (results {i} and {j}): clone one of them"
                )
        return same

    def _pairs(self, captured: Any, new: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield captured tensors with new ones; raises for whatever differs otherwise."""
        if isinstance(captured, _Container):
            parts = new.parts if isinstance(new, _Container) else parts_of(new)
            kind = new.kind if isinstance(new, _Container) else type(new)
            if kind is not captured.kind or parts is None or parts.keys() != captured.parts.keys():
                raise self._difference("structure", captured, _outline(new))
            for key, part in captured.parts.items():
                yield from self._pairs(part, parts[key])
        elif not isinstance(captured, Tensor):
            if not is_plain(new) or not equal(captured, new):
                raise self._difference("value", _outline(captured), _outline(new))
        elif not isinstance(new, Tensor):
            raise self._difference("type", "a tensor", type(new).__name__)
        else:
            if layout_of(captured) != layout_of(new):
                raise self._difference("layout", layout_of(captured), layout_of(new))
            for what in ("shape", "dtype", "device"):
                if getattr(captured, what) != getattr(new, what):
                    raise self._difference(what, getattr(captured, what), getattr(new, what))
            yield captured, new

    def _difference(self, what: str, captured: Any, new: Any) -> BreakOutputError:
        return BreakOutputError(
            f"break {self._name!r} returned another {what} than at capture: {new} instead of {captured}. "
            "The segment after it reads what was captured; return the same kind of result for every batch"
        )

    def _refusal(self, reason: str) -> BreakOutputError:
        return BreakOutputError(
            f"break {self._name!r} returned at capture what no replay could put back: {reason}"
        )


class _Container:
    """Keep the kind and the parts of a container as it was."""

    def __init__(self, kind: type, parts: dict[Any, Any]) -> None:
        self.kind = kind
        self.parts = parts

    def __repr__(self) -> str:
        return f"{self.kind.__name__} of {list(self.parts)}"


def _outline(value: Any) -> str:
    """Describe a result without its elements, which may be on a device or many."""
    if isinstance(value, Number):
        return repr(value)
    if is_plain(value):
        return str(value)
    parts = parts_of(value)
    return f"{type(value).__name__}" + ("" if parts is None else f" of {list(parts)}")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.data_ptr() == b.data_ptr()
        and a.stride() == b.stride()
        and a.shape == b.shape
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
