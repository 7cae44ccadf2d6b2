"""A line of a trace that is a JSON object: read, with every key checked."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bcg_harness.errors import HarnessError

_SHOWN = 80
"""Characters of a line that a message quotes."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Describe what stands under a key.

    Attributes:
        words: what is expected, for messages.
        fits: tells whether a value is of the right type.
        required: whether a line needs it.
    """

    words: str
    fits: Callable[[Any], bool]
    required: bool = False


def is_integer(value: Any) -> bool:
    """Tell whether ``value`` is a whole number; to Python, true is an integer."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Tell whether ``value`` is a number; to Python, true is one."""
    return type(value) in (int, float)


def read_line(line: str, keys: Mapping[str, Key], shape: str) -> dict[str, Any]:
    """Return the JSON object in ``line``; ``shape`` shows what a line looks like.

    Raises HarnessError for anything but an object that has these keys, once each, with values of their types.
    """
    try:
        raw: Any = json.loads(line, object_pairs_hook=_object)
    except HarnessError:
        raise
    except (ValueError, RecursionError) as error:
        raise HarnessError(f"no JSON: {error}; expected {shape}") from error
    if not isinstance(raw, dict) or any(
        key.required and name not in raw for name, key in keys.items()
    ):
        raise HarnessError(f"found {quoted(raw)}, expected {shape}")
    for name, value in raw.items():
        if name not in keys:
            raise HarnessError(f"unknown key {quoted(name)}; possible are {', '.join(keys)}")
        if not keys[name].fits(value):
            raise HarnessError(f"{name} is {quoted(value)}, expected {keys[name].words}")
    return raw


def quoted(raw: Any) -> str:
    """Return ``raw`` as JSON, and no more than its beginning where it is long."""
    text = json.dumps(raw)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises HarnessError for a key that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise HarnessError(f"the key {quoted(twice)} is there twice: keep one")
    return found
