"""Frozen dataclasses as JSON, and back, by what their annotations say."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bcg_harness.errors import HarnessError

_Kind = TypeVar("_Kind")


def to_json(value: Any) -> Any:
    """Return ``value`` as JSON has it: dataclasses and mappings as objects, tuples as arrays, enums as their values."""
    if is_dataclass(value):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def from_json(kind: type[_Kind], raw: Any) -> _Kind:
    """Return the dataclass ``kind`` that ``raw`` describes; keys that it has no field for are left alone.

    Raises HarnessError, with the place in ``raw``, for what is missing and for what is of another type.
    """
    found: _Kind = _read(kind, raw, "")
    return found


def _read(hint: Any, raw: Any, place: str) -> Any:
    if hint is Any:
        return raw
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (only,) = (each for each in arguments if each is not type(None))
        return None if raw is None else _read(only, raw, place)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _read_fixed(arguments, raw, place)
    if origin in (tuple, list):
        _require(isinstance(raw, list), "an array", raw, place)
        return origin(_read(arguments[0], each, f"{place}[{n}]") for n, each in enumerate(raw))
    if origin is not None:
        _require(isinstance(raw, dict), "an object", raw, place)
        return {
            _read_key(arguments[0], key, place): _read(arguments[1], each, _below(place, key))
            for key, each in raw.items()
        }
    if is_dataclass(hint):
        return _read_dataclass(hint, raw, place)
    if issubclass(hint, Enum):
        known = [each.value for each in hint]
        _require(raw in known, f"one of {known}", raw, place)
        return hint(raw)
    possible, words = _PLAIN[hint]
    _require(possible(raw), words, raw, place)
    return raw


def _read_dataclass(kind: Any, raw: Any, place: str) -> Any:
    _require(isinstance(raw, dict), "an object", raw, place)
    hints = get_type_hints(kind)
    values = {}
    for each in fields(kind):
        if each.name in raw:
            values[each.name] = _read(hints[each.name], raw[each.name], _below(place, each.name))
        elif each.default is MISSING and each.default_factory is MISSING:
            raise HarnessError(f"{_below(place, each.name)} is missing")
    try:
        return kind(**values)
    except HarnessError as error:
        raise HarnessError(f"{place or 'the whole'}: {error}") from error


def _read_fixed(hints: tuple[Any, ...], raw: Any, place: str) -> tuple[Any, ...]:
    right = isinstance(raw, list) and len(raw) == len(hints)
    _require(right, f"an array of {len(hints)}", raw, place)
    return tuple(_read(hint, raw[n], f"{place}[{n}]") for n, hint in enumerate(hints))


def _read_key(hint: Any, key: str, place: str) -> Any:
    if hint is str:
        return key
    _require(key.isdecimal(), "whole numbers as keys", key, place)
    return int(key)


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _require(right: bool, expected: str, raw: Any, place: str) -> None:
    if not right:
        found = repr(raw)
        shown = found if len(found) <= 60 else f"{found[:60]}..."
        raise HarnessError(f"{place or 'the whole'} is {shown}, expected {expected}")


# Not isinstance: to Python, true is an integer.
_PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda raw: type(raw) is str, "a text"),
    int: (lambda raw: type(raw) is int, "a whole number"),
    float: (lambda raw: type(raw) in (int, float) and isfinite(raw), "a number"),
}
