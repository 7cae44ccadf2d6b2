"""The shape of a Llama, and how to read it from a Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bcg_core.errors import CheckpointError
from bcg_core.spec import ModelSpec
from bcg_llama.fields import read_bool, read_int, read_number
from bcg_llama.hf_keys import DEFAULTS, UNSERVED
from bcg_llama.rope import RopeConfig
from bcg_llama.settings import refuse_unserved


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Describe a model of the Llama 2/3 family. Raises CheckpointError when the numbers do not fit together.

    Attributes:
        vocab_size: V, rows of the embedding and of the head.
        hidden_size: D, elements of the residual stream.
        intermediate_size: F, elements between the two halves of an MLP.
        num_layers: L, decoder layers.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H, elements a head, even; 0 derives D / N.
        rms_norm_eps: added to the mean square before its root.
        rope: how positions turn into angles.
        max_positions: positions that the RoPE table covers.
        tie_word_embeddings: the head is the embedding.
        attention_bias: q, k, v and o projections have a bias.
        mlp_bias: gate, up and down projections have a bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_positions: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly: "
                "num_kv_heads must divide num_heads"
            )
        if self.head_dim == 0:
            if self.hidden_size % self.num_heads:
                raise CheckpointError(
                    f"hidden_size {self.hidden_size} does not split into {self.num_heads} heads: "
                    "give head_dim, or a hidden_size that num_heads divides"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.head_dim < 0 or self.head_dim % 2:
            raise CheckpointError(
                f"head_dim is {self.head_dim}: RoPE rotates pairs, so it must be even"
            )
        divisors = self.rope.divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise CheckpointError(
                f"{len(divisors)} RoPE frequency divisors for {self.head_dim // 2} pairs of a head"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        """Read a ``config.json``, as written by transformers 4 or 5.

        Raises CheckpointError, saying what was found and what is possible, when it describes no Llama, quantised
        weights, an unknown kind of RoPE, or something else that would change results (``hf_keys.UNSERVED``).
        """
        model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
        if model_type != "llama" and "LlamaForCausalLM" not in architectures:
            raise CheckpointError(
                f"model_type is {model_type!r} and architectures {architectures!r}: "
                "only 'llama' (LlamaForCausalLM) can be loaded"
            )
        raw = {**DEFAULTS.get(str(model_type), {}), **raw}
        if quantization := raw.get("quantization_config") or raw.get("compression_config"):
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
            raise CheckpointError(
                f"weights are quantised ({method or quantization!r}): only float16, bfloat16 and float32 safetensors "
                "can be loaded, and GGUF, which is de-quantised"
            )
        num_heads = read_int(raw, "num_attention_heads")
        max_positions = read_int(raw, "max_position_embeddings", 2048)
        eps = read_number(raw, "rms_norm_eps")
        config = cls(
            vocab_size=read_int(raw, "vocab_size"),
            hidden_size=read_int(raw, "hidden_size"),
            intermediate_size=read_int(raw, "intermediate_size"),
            num_layers=read_int(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read_int(raw, "num_key_value_heads", num_heads),
            head_dim=read_int(raw, "head_dim", 0),
            rms_norm_eps=1e-6 if eps is None else eps,
            rope=RopeConfig.from_hf(raw, max_positions=max_positions),
            max_positions=max_positions,
            tie_word_embeddings=read_bool(raw, "tie_word_embeddings"),
            attention_bias=read_bool(raw, "attention_bias"),
            mlp_bias=read_bool(raw, "mlp_bias"),
        )
        slides = raw.get("use_sliding_window") is not False
        refuse_unserved(raw if slides else {**raw, "sliding_window": None}, UNSERVED, config)
        return config

    def spec(self, *, dtype: torch.dtype, device: torch.device) -> ModelSpec:
        """Return what the core must know of this model when it lives in ``dtype`` on ``device``."""
        return ModelSpec(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype=dtype,
            device=device,
        )
