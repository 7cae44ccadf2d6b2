"""The weights of a Llama, fused where one product can do the work of several.

Shape letters: V vocabulary, D model dim, F MLP intermediate, Y = N * H query heads, X = (N + 2K) * H all heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bcg_llama.config import LlamaConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """Hold the weights of one decoder layer.

    Attributes:
        attention_norm_D: scales the input of attention.
        qkv_XD: rows of the query, then key, then value projection.
        qkv_bias_X: their bias, if the model has one.
        o_DY: output projection of attention.
        o_bias_D: its bias, if the model has one.
        mlp_norm_D: scales the input of the MLP.
        gate_up_2FD: rows of the gate, then up projection.
        gate_up_bias_2F: their bias, if the model has one.
        down_DF: output projection of the MLP.
        down_bias_D: its bias, if the model has one.
    """

    attention_norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor | None
    o_DY: Tensor
    o_bias_D: Tensor | None
    mlp_norm_D: Tensor
    gate_up_2FD: Tensor
    gate_up_bias_2F: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class LlamaWeights:
    """Hold all weights of a Llama; plain tensors that need no gradient.

    Attributes:
        config: the shapes.
        embedding_VD: a row per token id.
        layers: one entry per decoder layer.
        norm_D: scales what the head reads.
        head_VD: a row per token id; ``embedding_VD`` itself when the two are tied.
    """

    config: LlamaConfig
    embedding_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head_VD: Tensor

    @classmethod
    def empty(
        cls, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device
    ) -> "LlamaWeights":
        """Allocate weights whose contents are undefined until ``named_tensors`` has been filled."""
        D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
        Y = config.num_heads * config.head_dim
        X = Y + 2 * config.num_kv_heads * config.head_dim

        def tensor(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def attention_bias(size: int) -> Tensor | None:
            return tensor(size) if config.attention_bias else None

        def mlp_bias(size: int) -> Tensor | None:
            return tensor(size) if config.mlp_bias else None

        embedding_VD = tensor(V, D)
        layers = tuple(
            LayerWeights(
                attention_norm_D=tensor(D),
                qkv_XD=tensor(X, D),
                qkv_bias_X=attention_bias(X),
                o_DY=tensor(D, Y),
                o_bias_D=attention_bias(D),
                mlp_norm_D=tensor(D),
                gate_up_2FD=tensor(2 * F, D),
                gate_up_bias_2F=mlp_bias(2 * F),
                down_DF=tensor(D, F),
                down_bias_D=mlp_bias(D),
            )
            for _ in range(config.num_layers)
        )
        head_VD = embedding_VD if config.tie_word_embeddings else tensor(V, D)
        return cls(
            config=config,
            embedding_VD=embedding_VD,
            layers=layers,
            norm_D=tensor(D),
            head_VD=head_VD,
        )

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its name in a Hugging Face checkpoint, as a view of the fused tensors.

        Writing to a view writes the weight. A tied head is not repeated.
        """
        yield "model.embed_tokens.weight", self.embedding_VD
        for index, layer in enumerate(self.layers):
            for name, tensor in self._layer_tensors(layer):
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self.norm_D
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head_VD

    def _layer_tensors(self, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = ("q_proj", "k_proj", "v_proj"), (q_size, kv_size, kv_size)
        gate_up = ("gate_proj", "up_proj"), (config.intermediate_size,) * 2
        yield "input_layernorm.weight", layer.attention_norm_D
        yield from _split("self_attn", "weight", *qkv, layer.qkv_XD)
        yield from _split("self_attn", "bias", *qkv, layer.qkv_bias_X)
        yield "self_attn.o_proj.weight", layer.o_DY
        if layer.o_bias_D is not None:
            yield "self_attn.o_proj.bias", layer.o_bias_D
        yield "post_attention_layernorm.weight", layer.mlp_norm_D
        yield from _split("mlp", "weight", *gate_up, layer.gate_up_2FD)
        yield from _split("mlp", "bias", *gate_up, layer.gate_up_bias_2F)
        yield "mlp.down_proj.weight", layer.down_DF
        if layer.down_bias_D is not None:
            yield "mlp.down_proj.bias", layer.down_bias_D


def _split(
    module: str, kind: str, names: tuple[str, ...], sizes: tuple[int, ...], fused: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a fused tensor, ``sizes`` rows each, under their names."""
    if fused is None:
        return
    for name, part in zip(names, torch.split(fused, list(sizes)), strict=True):
        yield f"{module}.{name}.{kind}", part
