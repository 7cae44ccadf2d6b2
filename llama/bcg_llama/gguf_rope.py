"""RoPE in the header of a GGUF file, as llama.cpp reads it; keys lack the leading ``llama.``."""

import math
from collections.abc import Mapping
from typing import Any

from bcg_core.errors import CheckpointError
from bcg_llama.fields import read_number

ROPE_FIELDS = frozenset(
    {
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",
    }
)
"""What is read here, and ``finetuned``, which changes nothing."""


def rope_parameters(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE of ``header`` in Hugging Face spelling; raises CheckpointError for what cannot be served."""
    theta = read_number(header, "rope.freq_base")
    parameters: dict[str, Any] = {"rope_theta": 10000.0 if theta is None else theta}
    # llama.cpp takes a factor without a type as linear, its old spelling too, and 0 as none.
    kind = header.get("rope.scaling.type", "linear")
    factor = read_number(header, "rope.scaling.factor")
    factor = (read_number(header, "rope.scale_linear") if factor is None else factor) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"RoPE scaling is {kind!r}; possible are none, linear and yarn")
    if kind == "yarn":
        return {**parameters, **_yarn(header, factor)}
    if (scale := _attention_factor(header)) != 1:
        raise CheckpointError(
            f"llama.rope.scaling.attn_factor is {scale}: only 1 can be served with RoPE scaling {kind!r}, as only yarn "
            "scales attention"
        )
    if kind == "linear" and factor != 1:
        parameters |= {"rope_type": "linear", "factor": factor}
    return parameters


def _yarn(header: Mapping[str, Any], factor: float) -> dict[str, Any]:
    scale = _attention_factor(header)
    derived = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
        "beta_fast": read_number(header, "rope.scaling.yarn_beta_fast"),
        "beta_slow": read_number(header, "rope.scaling.yarn_beta_slow"),
        "attention_factor": None if scale == 1 else scale * derived,
    }


def _attention_factor(header: Mapping[str, Any]) -> float:
    """Return what cosines and sines are multiplied by, beyond what follows from the factor."""
    keys = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
    return math.prod(1.0 if (value := read_number(header, key)) is None else value for key in keys)
