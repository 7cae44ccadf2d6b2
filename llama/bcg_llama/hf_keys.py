"""Keys of a ``config.json`` beyond the shape of a Llama: which are refused, and which are only named.

A key that changes nothing at any value, such as ``attention_dropout``, is in no list. Neither is ``pretraining_tp``: it
splits products, which rounds differently, and transformers 5 no longer reads it.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from bcg_llama.hf_rope import unused_rope_keys
from bcg_llama.settings import Unserved, at_least_the_context, equal_to, only

_ACTIVATION = only("the MLP of a Llama is gated by SiLU", "silu", "swish")
_ROTATION = only("queries and keys are rotated as a whole, half against half", 1, False)
_POSITIONS = only("RoPE is all that tells positions", "rope", "rotary", False)
_NO_ROPE = only("every layer rotates", 0)
_QK_NORM = only("queries and keys are not normalised", False)
_BIAS = only("biases are those of attention_bias and mlp_bias", False)
_CAPPED = only("logits and scores are not capped")
_SCALED = only("nothing is scaled between the layers of a Llama", 1, False)
_EXPERTS = only("the MLP has no experts", 0, 1)
_PARALLEL = only("attention comes before the MLP", False)
_MUP = only("nothing is scaled between the layers of a Llama", False)
_CAUSAL = only("prefill attends causally", True)
_BIDIRECTIONAL = only("prefill attends causally", False)

UNSERVED: Mapping[str, Unserved] = MappingProxyType(
    {
        "hidden_act": _ACTIVATION,
        "hidden_activation": _ACTIVATION,
        "activation_function": _ACTIVATION,
        "sliding_window": at_least_the_context(
            "attention goes back to the first token (max_position_embeddings lowered to the window serves what fits it)"
        ),
        "attention_chunk_size": at_least_the_context("attention goes back to the first token"),
        "layer_types": Unserved(
            effect="attention goes back to the first token in all layers",
            possible="'full_attention' for every layer",
            is_harmless=lambda value, config: set(value) <= {"full_attention"},
        ),
        "is_causal": _CAUSAL,
        "use_bidirectional_attention": _BIDIRECTIONAL,
        "attention_multiplier": equal_to(
            "scores are scaled by the root of head_dim",
            "1 / sqrt(head_dim)",
            lambda config: config.head_dim**-0.5,
        ),
        "query_pre_attn_scalar": equal_to(
            "scores are scaled by the root of head_dim",
            "head_dim",
            lambda config: config.head_dim,
        ),
        "attn_logit_softcapping": _CAPPED,
        "final_logit_softcapping": _CAPPED,
        "clip_qkv": only("queries, keys and values are not clipped"),
        "qk_norm": _QK_NORM,
        "use_qk_norm": _QK_NORM,
        "qk_layernorm": _QK_NORM,
        "use_qk_layernorm": _QK_NORM,
        "qkv_bias": _BIAS,
        "use_qkv_bias": _BIAS,
        "attn_temperature_tuning": only("queries are not scaled by their position", False),
        "rotary_pct": _ROTATION,
        "rope_ratio": _ROTATION,
        "rope_interleave": _ROTATION,
        "rope_interleaved": _ROTATION,
        "rope_local_base_freq": only("all layers rotate by the same angles"),
        "no_rope_layers": Unserved(
            effect="every layer rotates",
            possible="1 for every layer",
            is_harmless=lambda value, config: isinstance(value, list) and all(value),
        ),
        "no_rope_layer_interval": _NO_ROPE,
        "nope_layer_interval": _NO_ROPE,
        "position_embedding_type": _POSITIONS,
        "alibi": _POSITIONS,
        "use_alibi": _POSITIONS,
        "embedding_multiplier": _SCALED,
        "scale_emb": _SCALED,
        "scale_embedding": _SCALED,
        "residual_multiplier": _SCALED,
        "residual_scale": _SCALED,
        "key_multiplier": _SCALED,
        "lm_head_multiplier": _SCALED,
        "logit_scale": _SCALED,
        "logits_scaling": _SCALED,
        "output_multiplier_scale": _SCALED,
        "scale_depth": equal_to(
            "what a layer adds is not scaled",
            "sqrt(num_hidden_layers)",
            lambda config: config.num_layers**0.5,
        ),
        "dim_model_base": equal_to(
            "logits are not scaled", "hidden_size", lambda config: config.hidden_size
        ),
        "use_mup": _MUP,
        "mup_enabled": _MUP,
        "num_experts": _EXPERTS,
        "num_local_experts": _EXPERTS,
        "n_routed_experts": _EXPERTS,
        "parallel_attn": _PARALLEL,
        "use_parallel_residual": _PARALLEL,
        "num_kv_shared_layers": only("every layer has keys and values of its own", 0),
    }
)
"""Keys that change what a model computes, with the values at which they do not."""

_LOOKS_LIKE_IT = ("rope_*", "*_scal*", "sliding*", "attn*")
_KNOWN = frozenset(
    {
        *UNSERVED,
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "attn_implementation",
        "attn_dropout",
        "attn_pdrop",
    }
)

DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "mistral": {
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        }
    }
)
"""What a missing key means by ``model_type``, where that differs from Llama."""


def unknown_keys(raw: Mapping[str, Any]) -> list[str]:
    """Return the keys of a ``config.json`` that nothing here reads, and that look as if they changed results."""
    named = [
        key
        for key, value in raw.items()
        if key not in _KNOWN
        and value is not None
        and value is not False
        and any(fnmatchcase(key, pattern) for pattern in _LOOKS_LIKE_IT)
    ]
    return sorted(named) + unused_rope_keys(raw)
