"""Boundary buffers: the memory through which segments and attention breaks talk.

Shape letters: T bucket (padded) tokens, R real tokens, N query heads, K KV heads, H head dim, X a fused row of heads.

One set per runner, sized by the largest bucket and shared by all layers and buckets. Segments are recorded against
these addresses, so nothing that crosses a break lives in graph memory, and graph memory does not grow with the number
of layers or buckets.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bcg_core.allocation import allocating
from bcg_core.errors import BucketError
from bcg_core.spec import ModelSpec


def token_boundary_bytes(spec: ModelSpec) -> int:
    """Return the bytes of one token's q, k, v and attention output."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    return heads * spec.head_dim * spec.dtype.itemsize


class BoundaryBuffers:
    """Own the q, k, v and attention output rows of up to ``max_tokens`` tokens.

    ``qkv_MX`` holds a row ``[q (N*H) | k (K*H) | v (K*H)]`` per token, ``out_MX`` a row of N*H; M is ``max_tokens``.
    Both start as zeros and keep their address for life. Raises BucketError, with the number that fits, for more tokens
    than the device has memory for.
    """

    def __init__(self, spec: ModelSpec, max_tokens: int) -> None:
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.spec = spec
        self.max_tokens = max_tokens
        token_bytes = token_boundary_bytes(spec)
        with allocating("a bucket", max_tokens, "tokens", token_bytes, spec.device, BucketError):
            self.qkv_MX = torch.zeros(max_tokens, width, dtype=spec.dtype, device=spec.device)
            self.out_MX = torch.zeros(
                max_tokens, spec.num_heads * spec.head_dim, dtype=spec.dtype, device=spec.device
            )

    def rows(self, start: int, stop: int) -> "BoundaryRows":
        """Return views of the rows ``start:stop``; nothing is copied."""
        return BoundaryRows(
            spec=self.spec, qkv_TX=self.qkv_MX[start:stop], out_TX=self.out_MX[start:stop]
        )

    def fill_(self, value: float) -> None:
        """Fill every element with ``value``; NaN is how the harness finds rows that nobody wrote."""
        self.qkv_MX.fill_(value)
        self.out_MX.fill_(value)


@dataclass(frozen=True, kw_only=True)
class BoundaryRows:
    """View some rows of the boundary buffers, split into heads.

    The head views alias ``qkv_TX`` and ``out_TX``: their last dimension is contiguous, their rows are strided.
    """

    spec: ModelSpec
    qkv_TX: Tensor
    out_TX: Tensor

    @cached_property
    def heads_TAH(self) -> Tensor:
        """Return all heads, ``[T, A, H]`` with A = N + 2K: query, then key, then value heads."""
        return self.qkv_TX.view(self.qkv_TX.shape[0], -1, self.spec.head_dim)

    @cached_property
    def qk_TAH(self) -> Tensor:
        """Return the heads that RoPE rotates, ``[T, A, H]`` with A = N + K: query, then key heads."""
        return self.heads_TAH[:, : self.spec.num_heads + self.spec.num_kv_heads]

    @cached_property
    def q_TNH(self) -> Tensor:
        """Return the query heads, ``[T, N, H]``."""
        return self.heads_TAH[:, : self.spec.num_heads]

    @cached_property
    def k_TKH(self) -> Tensor:
        """Return the key heads, ``[T, K, H]``."""
        return self.qk_TAH[:, self.spec.num_heads :]

    @cached_property
    def v_TKH(self) -> Tensor:
        """Return the value heads, ``[T, K, H]``."""
        return self.heads_TAH[:, self.spec.num_heads + self.spec.num_kv_heads :]

    @cached_property
    def out_TNH(self) -> Tensor:
        """Return the attention output, ``[T, N, H]``, contiguous."""
        return self.out_TX.view(self.out_TX.shape[0], self.spec.num_heads, self.spec.head_dim)
