"""What the header of a GGUF file says of a Llama, as llama.cpp reads it.

transformers looks at a few of these fields only, and leaves out RoPE scaling among others. Keys lack the leading
``llama.`` here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bcg_core.errors import CheckpointError
from bcg_llama.checkpoint import listed
from bcg_llama.config import LlamaConfig
from bcg_llama.fields import read_int
from bcg_llama.gguf_rope import ROPE_FIELDS, rope_parameters
from bcg_llama.settings import Unserved, at_least_the_context, equal_to, only, refuse_unserved

_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
)
"""Fields that every file has, by their names in a ``config.json``."""

_HEAD = equal_to(
    "whole heads are rotated, and keys are as long as values",
    "the length of a head",
    lambda config: config.head_dim,
)
_CAPPED = only("logits and scores are not capped", 0)
_SCALED = only("nothing is scaled between the layers of a Llama", 0, 1)

_UNSERVED: Mapping[str, Unserved] = MappingProxyType(
    {
        "rope.dimension_count": _HEAD,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "vocab_size": equal_to(
            "each row is a token",
            "the number of rows of token_embd.weight",
            lambda config: config.vocab_size,
        ),
        "attention.sliding_window": at_least_the_context("attention goes back to the first token"),
        "attention.causal": only("prefill attends causally", True),
        "attention.scale": equal_to(
            "scores are scaled by the root of the length of a head",
            "1 / sqrt(length of a head)",
            lambda config: config.head_dim**-0.5,
        ),
        "attention.clamp_kqv": only("queries, keys and values are not clipped", 0),
        "attention.max_alibi_bias": only("RoPE is all that tells positions", 0),
        "attention.temperature_*": only("queries are not scaled by their position", 0),
        "attention.output_scale": _SCALED,
        "attn_logit_softcapping": _CAPPED,
        "final_logit_softcapping": _CAPPED,
        "logit_scale": _SCALED,
        "residual_scale": _SCALED,
        "embedding_scale": _SCALED,
        "expert_*": only("the MLP has no experts", 0, False),
        "interleave_moe_layer_step": only("the MLP has no experts", 0),
        "use_parallel_residual": only("attention comes before the MLP", False),
        "pooling_type": only("the last token of a request is what counts", 0),
        "rope.dimension_sections": only("a token has one position"),
        "rope.scaling.alpha": only("no base depends on the context", 0, 1),
        "rope.scaling.yarn_ext_factor": only("yarn mixes both kinds of angles in full", -1, 1),
        "rope.scaling.yarn_log_multiplier": only("yarn scales by its factor alone", 0),
    }
)

_READ = frozenset(
    {
        *_SIZES,
        "attention.head_count_kv",
        *ROPE_FIELDS,
        "tensor_data_layout",
    }
)


def require_sizes(header: Mapping[str, Any]) -> None:
    """Raise CheckpointError for fields that every file has, and that transformers would make up."""
    if missing := _SIZES.keys() - header.keys():
        raise CheckpointError(listed("missing field", (f"llama.{key}" for key in missing)))


def read_header(
    header: Mapping[str, Any], *, vocab_size: int, query_rows: int, tied: bool
) -> LlamaConfig:
    """Return the configuration that ``header`` describes, RoPE divisors left out.

    Raises CheckpointError for fields that make no sense, and for those that change results and are not served.

    Args:
        header: the fields under ``llama.``, without it.
        vocab_size: V, rows of the embedding.
        query_rows: rows of a query projection, N * H.
        tied: there is no head of its own.
    """
    raw: dict[str, Any] = {theirs: header[ours] for ours, theirs in _SIZES.items()}
    head_dim = query_rows // max(1, read_int(raw, "num_attention_heads"))
    raw |= {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "head_dim": head_dim,
        "num_key_value_heads": header.get("attention.head_count_kv"),
        "tie_word_embeddings": tied,
        "rope_parameters": rope_parameters(header),
    }
    config = LlamaConfig.from_hf(raw)
    refuse_unserved(header, _UNSERVED, config, prefix="llama.")
    return config


def unknown_fields(header: Mapping[str, Any]) -> list[str]:
    """Return the fields of ``header`` that nothing here reads or refuses, by their full names."""
    patterns = tuple(key.removesuffix("*") for key in _UNSERVED if key.endswith("*"))
    known = _READ | _UNSERVED.keys()
    return sorted(
        f"llama.{key}" for key in header if key not in known and not key.startswith(patterns)
    )
