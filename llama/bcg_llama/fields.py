"""Typed reads from the JSON objects that describe a checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcg_core.errors import CheckpointError


def read_number(raw: Mapping[str, Any], key: str) -> float | None:
    """Return the number at ``key``; None when it is missing or null. Raises CheckpointError for anything else."""
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{key} is {value!r}, expected a number")
    return value


def read_int(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the whole number at ``key``, or ``default``; raises CheckpointError when there is neither."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{key} is {value!r}, expected a whole number")
    return value


def read_bool(raw: Mapping[str, Any], key: str) -> bool:
    """Return the truth value at ``key``; False when it is missing or null. Raises CheckpointError for anything else."""
    value = raw.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}, expected true or false")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises CheckpointError when there is none."""
    if not path.is_file():
        found = ", ".join(sorted(other.name for other in path.parent.iterdir()))
        raise CheckpointError(f"{path.parent}: no {path.name}; found {found or 'nothing'}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(value).__name__}")
    return value
