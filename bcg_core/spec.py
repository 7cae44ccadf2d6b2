"""Shapes and limits that the model, the KV cache and the attention backends agree on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Describe what the core must know of a model.

    Attributes:
        num_layers: L, decoder layers; each has one attention break.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; divides N.
        head_dim: H, elements a head.
        hidden_size: D, elements of the residual stream.
        vocab_size: V, token ids are in ``[0, V)``.
        max_positions: positions that the RoPE table covers, in ``[0, max_positions)``.
        dtype: of activations, weights and KV cache.
        device: where all of it lives.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Describe the attention that a backend is asked to serve: causal, grouped heads, paged KV.

    Attributes:
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads; query head h reads KV head ``h // (N // K)``.
        head_dim: H, elements a head, the same for keys and values.
        dtype: of q, k, v, the cache and the output.
        page_size: tokens a KV page.
        scale: factor on the logits before the softmax.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    scale: float

    @classmethod
    def of(cls, model: ModelSpec, *, page_size: int) -> "AttentionSpec":
        """Derive the attention of ``model`` over pages of ``page_size`` tokens, scaled by ``H ** -0.5``."""
        return cls(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            page_size=page_size,
            scale=model.head_dim**-0.5,
        )

    @property
    def group_size(self) -> int:
        """Return N / K, the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class BackendLimits:
    """Bound what a backend will be asked for, so that it can allocate its workspaces once.

    Attributes:
        max_tokens: most new tokens R of a batch.
        max_requests: most requests B of a batch.
        max_context: longest request, prefix and new tokens together.
        num_pages: pages P of the KV cache, page 0 included.
    """

    max_tokens: int
    max_requests: int
    max_context: int
    num_pages: int
