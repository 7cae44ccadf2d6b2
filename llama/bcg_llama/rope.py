"""Rotary position embedding: how positions turn into angles, and how checkpoints say so."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bcg_core.errors import CheckpointError
from bcg_llama.fields import read_number
from bcg_llama.hf_rope import rope_object, type_of

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_SAME_NAME = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
"""Numbers that Hugging Face calls as ``RopeConfig`` does."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Describe how a position turns into rotation angles.

    A field that ``rope_type`` does not use is ignored.

    Attributes:
        rope_type: one of ``ROPE_TYPES``.
        theta: base of the wavelengths.
        factor: by how much the context was stretched (linear, llama3, yarn).
        original_max_positions: context before stretching (llama3, yarn).
        low_freq_factor: llama3: wavelengths above ``original_max_positions / low_freq_factor`` are stretched in full.
        high_freq_factor: llama3: wavelengths below ``original_max_positions / high_freq_factor`` are kept.
        beta_fast: yarn: pairs that turn more often than this over the original context are kept.
        beta_slow: yarn: pairs that turn less often than this are stretched in full.
        attention_factor: yarn: factor on cos and sin; None derives it from the factor and the mscales.
        mscale: yarn: weight of log(factor) in the numerator of the derived attention factor.
        mscale_all_dim: yarn: the same for the denominator; both or neither.
        truncate: yarn: round the bounds of the ramp to whole pairs.
        divisors: what each of the F frequencies is divided by at the end; GGUF files carry Llama 3 scaling like this.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type == "dynamic":
            raise CheckpointError(
                "rope type 'dynamic' cannot be served: its table depends on the length of each request, and a table "
                f"that is captured once cannot change; possible are {', '.join(ROPE_TYPES)}"
            )
        if self.rope_type not in ROPE_TYPES:
            raise CheckpointError(
                f"unknown rope type {self.rope_type!r}; possible are {', '.join(ROPE_TYPES)}"
            )
        if self.theta <= 0 or self.factor <= 0:
            raise CheckpointError(
                f"rope theta ({self.theta}) and factor ({self.factor}) must be positive"
            )
        if self.rope_type in ("llama3", "yarn") and not self.original_max_positions:
            raise CheckpointError(
                f"rope type {self.rope_type!r} needs original_max_positions, the context before stretching"
            )
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"rope type 'llama3' needs high_freq_factor ({self.high_freq_factor}) above "
                f"low_freq_factor ({self.low_freq_factor})"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, max_positions: int) -> "RopeConfig":
        """Read the RoPE part of a whole ``config.json``.

        Takes the spellings of transformers 4 (``rope_theta`` beside ``rope_scaling``) and 5 (``rope_parameters``), and
        the older key ``type`` for ``rope_type``. Raises CheckpointError for what this library cannot serve.
        """
        key, found = rope_object(raw)
        params = {"rope_theta": raw.get("rope_theta"), **found}
        partial = params.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise CheckpointError(
                f"partial_rotary_factor is {partial}: Llama rotates whole heads, so only 1 is possible"
            )
        rope_type = type_of(params)
        if rope_type == "default" and params.get("factor") not in (None, 1):
            raise CheckpointError(
                f"{key} has factor {params['factor']!r}, but rope_type 'default' stretches nothing: name the rope_type "
                f"that the model was trained with ({', '.join(ROPE_TYPES[1:])}), or remove the factor"
            )
        names = {
            "theta": "rope_theta",
            "original_max_positions": "original_max_position_embeddings",
            **{name: name for name in _SAME_NAME},
        }
        read = {ours: read_number(params, theirs) for ours, theirs in names.items()}
        values: dict[str, Any] = {ours: value for ours, value in read.items() if value is not None}
        if rope_type in ("llama3", "yarn"):
            original = raw.get("original_max_position_embeddings")
            original = original or values.get("original_max_positions") or max_positions
            values["original_max_positions"] = int(original)
        if rope_type == "yarn":
            values.setdefault("factor", max_positions / values["original_max_positions"])
        required = {
            "linear": ["factor"],
            "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
        }
        if missing := [name for name in required.get(rope_type, []) if name not in values]:
            raise CheckpointError(f"rope type {rope_type!r} needs {', '.join(missing)}")
        return cls(rope_type=rope_type, truncate=bool(params.get("truncate", True)), **values)

    @property
    def scale(self) -> float:
        """Return the factor on cos and sin: 1 except for yarn."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(
                self.factor, self.mscale_all_dim
            )
        return _yarn_scale(self.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
