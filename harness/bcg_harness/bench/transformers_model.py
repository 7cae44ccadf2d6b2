"""The same weights in transformers' ``LlamaForCausalLM``, without a copy.

Shape letters: B requests, S tokens of the longest request, D model dim.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from bcg_llama import LlamaConfig, LlamaModel
from bcg_llama.rope_table import inverse_frequencies


class TransformersLlama:
    """Hold a ``LlamaForCausalLM`` that shares the storage of every weight with ``model``.

    Args:
        model: whose weights to take.

    Attributes:
        causal_lm: the model of transformers, in evaluation mode.
    """

    def __init__(self, model: LlamaModel) -> None:
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            self.causal_lm: Any = LlamaForCausalLM(_configuration(model.config, model.spec.dtype))
        self.causal_lm.load_state_dict(dict(model.named_tensors()), strict=False, assign=True)
        if model.config.tie_word_embeddings:
            self.causal_lm.lm_head.weight = self.causal_lm.model.embed_tokens.weight
        self.causal_lm.eval().requires_grad_(False)
        self._set_rope(model)
        parameters = inspect.signature(self.causal_lm.model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache"

    def _set_rope(self, model: LlamaModel) -> None:
        """Put the angles of ``model`` there, which says every kind of RoPE that it can have."""
        rotary = self.causal_lm.model.rotary_emb
        frequencies = inverse_frequencies(model.config.rope, model.config.head_dim)
        for name, _ in list(rotary.named_buffers()):
            setattr(rotary, name, frequencies.to(model.spec.device))
        rotary.attention_scaling = model.config.rope.scale

    @property
    def implementation(self) -> str:
        """Return the name of the attention that is used."""
        return str(self.causal_lm.config._attn_implementation)

    def use(self, implementation: str) -> None:
        """Switch to another attention of transformers; raises whatever transformers raises where it is not usable."""
        self.causal_lm.set_attn_implementation(implementation)

    def new_cache(self) -> Any:
        """Return an empty cache."""
        from transformers import DynamicCache

        return DynamicCache()

    def hidden(self, input_ids_BS: Tensor, cache: Any, **inputs: Any) -> Tensor:
        """Return normalised hidden states ``[B, S, D]`` of all tokens; keys and values are appended to ``cache``."""
        inputs[self._cache_name] = cache
        output = self.causal_lm.model(input_ids=input_ids_BS, use_cache=True, **inputs)
        hidden_BSD: Tensor = output.last_hidden_state
        return hidden_BSD

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits ``[B, V]`` of normalised hidden states."""
        logits_BV: Tensor = self.causal_lm.lm_head(hidden_BD)
        return logits_BV


def _configuration(config: LlamaConfig, dtype: torch.dtype) -> Any:
    """Return the shapes for transformers; RoPE is put in place afterwards."""
    from transformers import LlamaConfig as Configuration

    return Configuration(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        dtype=dtype,
        bos_token_id=None,
        eos_token_id=None,
    )
