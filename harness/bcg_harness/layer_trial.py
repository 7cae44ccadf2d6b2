"""One layer's attention outside of any forward, on queries that the harness draws.

Shape letters: R new tokens of a batch, Q those of one request, S its tokens from the first on, N query heads,
K KV heads, H head dim, G = N / K query heads of a group.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from bcg_core import AttentionBackend, Metadata, ModelSpec, PrefillBatch
from bcg_core.attention import sequential_matmul, tensor_core_matmul
from bcg_core.boundary import BoundaryBuffers
from bcg_harness.budgets import Measured
from bcg_harness.oracle import cached_slots, cached_tokens, measure_attention

_LAYER = 0
"""Whose keys and values serve: a backend is the same for all layers."""


class LayerTrial:
    """Attend to one layer of ``batch``: keys and values are what the cache holds now, queries are drawn.

    Inputs have the strides of a forward's, and the output is NaN before each call. Nothing of a runner is touched. What
    a backend does to its inputs, or to the batch's slots, is undone after each call: it is judged elsewhere.

    Args:
        batch: whose new tokens attend; their keys and values are in the cache already.
        spec: of the model.
        scale: factor on the logits.
        largest_logit: what queries are scaled to; None leaves them normal.
    """

    def __init__(
        self,
        batch: PrefillBatch,
        spec: ModelSpec,
        *,
        scale: float,
        largest_logit: float | None = None,
    ) -> None:
        self._batch = batch
        self._rows = BoundaryBuffers(spec, batch.num_tokens).rows(0, batch.num_tokens)
        self._scale = scale
        self._keys, self._values = batch.kv_cache.flat(_LAYER)
        self._cached = cached_tokens(batch.kv_cache, _LAYER, cached_slots(batch))
        self._new_R = batch.slot_mapping_R.to(batch.device)
        self._rows.k_TKH.copy_(self._keys[self._new_R])
        self._rows.v_TKH.copy_(self._values[self._new_R])
        generator = torch.Generator(batch.device).manual_seed(batch.num_tokens)
        drawn_RNH = torch.randn(
            self._rows.q_TNH.shape, generator=generator, device=batch.device, dtype=torch.float32
        )
        if largest_logit is not None:
            drawn_RNH *= self._gain(drawn_RNH, largest_logit)
        self._rows.q_TNH.copy_(drawn_RNH)

    def run(self, backend: AttentionBackend) -> Tensor:
        """Prepare the batch, and do what ``attend`` does."""
        return self.attend(backend, backend.init_forward_metadata(self._batch))

    def attend(self, backend: AttentionBackend, metadata: Metadata) -> Tensor:
        """Return a copy of what ``backend`` computes with ``metadata``, which was prepared for the batch."""
        rows = self._rows
        rows.out_TX.fill_(float("nan"))
        out = rows.out_TNH if backend.capabilities.supports_out else None
        given_TX = rows.qkv_TX.clone()
        result = backend.forward(
            rows.q_TNH, rows.k_TKH, rows.v_TKH, self._batch.kv_cache, _LAYER, metadata, out
        )
        copy = result.clone()
        rows.qkv_TX.copy_(given_TX)
        self._keys[self._new_R] = rows.k_TKH
        self._values[self._new_R] = rows.v_TKH
        return copy

    def measure(self, result_RNH: Tensor) -> list[Measured]:
        """Measure ``result_RNH`` by the definition of attention on the same inputs, request by request."""
        return measure_attention(
            result_RNH,
            self._rows.q_TNH,
            self._batch,
            self._cached,
            _LAYER,
            scale=self._scale,
        )

    def logit_error(self) -> float:
        """Return the largest error that summing in float32, as exactly as kernels do and no more, makes in a logit."""
        matmul = tensor_core_matmul if self._keys.is_cuda else sequential_matmul
        errors = [
            _products(q_QNH.float(), k_SKH.float(), matmul)
            - _products(q_QNH.double(), k_SKH.double(), torch.matmul)
            for q_QNH, k_SKH in self._requests(self._rows.q_TNH)
        ]
        # Where a key was never written there may be NaN, which says nothing of rounding.
        largest = (error.nan_to_num(0, 0, 0).abs().max().item() for error in errors)
        return max(largest) * self._scale

    def _requests(self, q_RNH: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield queries and keys request by request."""
        for rows, (k_SKH, _) in zip(pairwise(self._batch.cu_new_lens), self._cached, strict=True):
            yield q_RNH[slice(*rows)], k_SKH

    def _gain(self, drawn_RNH: Tensor, largest_logit: float) -> float:
        """Return the factor that makes the logit that is farthest from 0 ``largest_logit``, among those that count."""
        farthest = 0.0
        for q_QNH, k_SKH in self._requests(drawn_RNH):
            products_KGQS = _products(q_QNH, k_SKH.float(), torch.matmul)
            seen_KGQS = products_KGQS.tril(k_SKH.shape[0] - q_QNH.shape[0])
            ends = seen_KGQS.max().item(), seen_KGQS.min().item()
            farthest = max(farthest, *ends, key=abs)
        # Where a short key is all there is, queries still stay far from what their type can hold.
        most = 0.1 * torch.finfo(self._keys.dtype).max / drawn_RNH.abs().max().item()
        if not farthest:
            return most
        return max(-most, min(largest_logit / (farthest * self._scale), most))


def _products(q_QNH: Tensor, k_SKH: Tensor, matmul: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the product of every query with every key of its group, ``[K, G, Q, S]``."""
    q_KGQH = q_QNH.unflatten(1, (k_SKH.shape[1], -1)).permute(1, 2, 0, 3)
    return matmul(q_KGQH, k_SKH.permute(1, 2, 0)[:, None])
