"""Settings of a checkpoint that change its results and that no Llama here computes: refused by name."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from bcg_core.errors import CheckpointError

if TYPE_CHECKING:
    from bcg_llama.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """Describe a setting that is served at harmless values only.

    Attributes:
        effect: what it does elsewhere, as a clause.
        possible: the harmless values, in words.
        is_harmless: tells whether a value leaves the results of a model as they are.
    """

    effect: str
    possible: str
    is_harmless: Callable[[Any, "LlamaConfig"], bool]


def only(effect: str, *values: Any) -> Unserved:
    """Return a setting that is harmless at ``values``; True is not 1, and False not 0."""

    def is_harmless(value: Any, config: "LlamaConfig") -> bool:
        return any(
            value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
            for harmless in values
        )

    words = " or ".join(map(str, values)) or "null"
    return Unserved(effect=effect, possible=words, is_harmless=is_harmless)


def equal_to(effect: str, possible: str, expected: Callable[["LlamaConfig"], float]) -> Unserved:
    """Return a setting that is harmless where it says what this model does anyway."""

    def is_harmless(value: Any, config: "LlamaConfig") -> bool:
        return isinstance(value, int | float) and math.isclose(
            value, expected(config), rel_tol=1e-4
        )

    return Unserved(effect=effect, possible=possible, is_harmless=is_harmless)


def at_least_the_context(effect: str) -> Unserved:
    """Return a window that is harmless where no request can be longer."""
    return Unserved(
        effect=effect,
        possible="null or at least the context",
        is_harmless=lambda value, config: isinstance(value, int) and value >= config.max_positions,
    )


def refuse_unserved(
    settings: Mapping[str, Any],
    unserved: Mapping[str, Unserved],
    config: "LlamaConfig",
    *,
    prefix: str = "",
) -> None:
    """Raise CheckpointError for the first of ``settings`` that would change what ``config`` computes.

    Keys of ``unserved`` may be patterns. Null is harmless everywhere. The error names a key behind its ``prefix``.
    """
    for key, value in settings.items():
        for pattern, setting in unserved.items():
            if value is None or not fnmatchcase(key, pattern):
                continue
            if not setting.is_harmless(value, config):
                raise CheckpointError(
                    f"{prefix}{key} is {value!r}: only {setting.possible} can be served, as {setting.effect}"
                )
