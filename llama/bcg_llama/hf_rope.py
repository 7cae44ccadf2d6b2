"""The part of a ``config.json`` that describes RoPE: where it is, and which of its keys count."""

from collections.abc import Mapping
from typing import Any

from bcg_core.errors import CheckpointError

_COMMON = frozenset(
    {
        "rope_theta",
        "rope_type",
        "type",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "finetuned",
    }
)
_USED = {
    "llama3": _COMMON | {"low_freq_factor", "high_freq_factor"},
    "yarn": _COMMON
    | {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
}
"""The keys of a type that has some of its own."""


def rope_object(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the RoPE part of a whole ``config.json`` and the key that it is under.

    Raises CheckpointError when it is no object, or one for each type of layer.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    found = raw.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} is {found!r}, expected an object")
    if layered := [name for name, value in found.items() if isinstance(value, Mapping)]:
        raise CheckpointError(
            f"{key} differs by the type of layer ({', '.join(layered)}): only one RoPE for all layers can be served"
        )
    return key, found


def type_of(params: Mapping[str, Any]) -> str:
    """Return the type that a RoPE object names, by its new key or the old one."""
    return str(params.get("rope_type") or params.get("type") or "default")


def unused_rope_keys(raw: Mapping[str, Any]) -> list[str]:
    """Return what the RoPE part of a ``config.json`` says that its type does not use, as ``object.key``."""
    key, found = rope_object(raw)
    used = _USED.get(type_of(found), _COMMON)
    return sorted(
        f"{key}.{name}" for name, value in found.items() if name not in used and value is not None
    )
