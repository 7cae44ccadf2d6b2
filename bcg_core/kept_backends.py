"""The backends that a runner has used and may use again."""

from collections.abc import Hashable, Mapping
from enum import Enum
from types import NoneType
from typing import Any

import torch

from bcg_core.backend import AttentionBackend

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
"""What is equal only to what means the same, and cannot change."""


class KeptBackends:
    """Remember backends, with what they were made of, as long as they are among the last ``most`` to be used.

    Args:
        most: how many are remembered; the one in use is always among them.

    Raises ValueError for less than one.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"keep_backends is {most}, but the backend in use is kept")
        self._most = most
        self._recipes: dict[AttentionBackend, Hashable] = {}

    def latest(self) -> tuple[AttentionBackend, ...]:
        """Return all that are remembered, the one in use first."""
        return tuple(reversed(self._recipes))

    def find(self, recipe: Hashable) -> AttentionBackend | None:
        """Return the backend that was made of ``recipe``."""
        made = (backend for backend, known in self._recipes.items() if known == recipe)
        return next(made, None)

    def use(self, backend: AttentionBackend, recipe: Hashable) -> list[AttentionBackend]:
        """Remember ``backend`` as the one in use; return those that are therefore forgotten."""
        self._recipes[backend] = self._recipes.pop(backend, recipe)
        oldest = list(self._recipes)[: -self._most]
        for forgotten in oldest:
            del self._recipes[forgotten]
        return oldest


def recipe_of(name: str, options: Mapping[str, Any]) -> Hashable:
    """Return what is equal for the same ``name`` with the same ``options``, and for nothing else.

    What may change without being seen, such as a tensor, makes a recipe that is equal to no other.
    """
    return name, _frozen(dict(options))


def _frozen(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(_frozen(item) for item in value)
    if type(value) in (set, frozenset):
        return type(value), frozenset(_frozen(item) for item in value)
    if type(value) is dict:
        return dict, frozenset((_frozen(key), _frozen(item)) for key, item in value.items())
    return object()
