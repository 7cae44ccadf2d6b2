"""What the right results are: hidden states from the reference, and attention from its definition.

Shape letters: S tokens of one request from its first, R new tokens of one request, D model dim, N query heads,
K KV heads, H head dim.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from bcg_core import PagedKVCache, PrefillBatch, causal_attention, low_attention
from bcg_harness.budgets import Errors, Measured, RowErrors
from bcg_harness.reference import LlamaReference, high_precision
from bcg_harness.tokens import TokenSource

Cached = tuple[Tensor, Tensor]
"""Keys and values of all tokens of one request, each ``[S, K, H]``."""


class HiddenOracle:
    """Know the hidden states of every sequence, computed in one pass over its whole history.

    A sequence number has the same tokens in every case, and attention is causal, so one pass over the longest history
    serves all cases, steps and backends.

    Args:
        reference: computes them.
        source: gives the tokens.
        lengths: tokens of each sequence.
        dtype: the model's.
        advance: called with the number of sequences done.
    """

    def __init__(
        self,
        reference: LlamaReference,
        source: TokenSource,
        lengths: Mapping[int, int],
        dtype: torch.dtype,
        advance: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._hidden: dict[int, Tensor] = {}
        self._low: list[RowErrors] = []
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for sequence, length in lengths.items():
            by_length[length].append(sequence)
        for length, sequences in by_length.items():
            token_ids = [source.tokens(sequence, length) for sequence in sequences]
            low_BSD = reference.hidden(token_ids, dtype)
            high_BSD = reference.hidden(token_ids, high_precision(dtype))
            self._hidden.update(zip(sequences, high_BSD, strict=True))
            self._low += map(RowErrors.between, low_BSD, high_BSD)
            advance(len(sequences))

    def hidden(self, sequence: int, start: int, stop: int) -> Tensor:
        """Return what tokens ``start`` to ``stop`` of ``sequence`` should come out as, ``[R, D]``; a view."""
        return self._hidden[sequence][start:stop]

    @cache  # noqa: B019  # lives as long as the run that it belongs to
    def low_errors(self, rows: int) -> Errors:
        """Return the errors of the low-precision reference on ``rows`` rows: the largest found in all this data.

        Of one row alone the error is a single sample, which says little. The worst of as many rows anywhere in the data
        says what rounding can do.
        """
        return Errors(
            whole=max(low.worst_stretch(rows) for low in self._low),
            row=max(low.worst_stretch(1) for low in self._low),
        )


def cached_slots(batch: PrefillBatch) -> list[Tensor]:
    """Return, for each request, the flat KV slots of its tokens from the first on, int64 on the device."""
    offsets = torch.arange(batch.page_size)
    pages_BW = batch.page_table_BW.to(torch.int64)
    slots_BWS = pages_BW[:, :, None] * batch.page_size + offsets
    return [
        slots.flatten()[:length].to(batch.device)
        for slots, length in zip(slots_BWS, batch.kv_lens, strict=True)
    ]


def cached_tokens(kv_cache: PagedKVCache, layer: int, slots: list[Tensor]) -> list[Cached]:
    """Return copies of the keys and values in ``slots``, request by request."""
    keys, values = kv_cache.flat(layer)
    return [(keys[request_slots], values[request_slots]) for request_slots in slots]


def measure_attention(
    out_RNH: Tensor,
    q_RNH: Tensor,
    batch: PrefillBatch,
    cached: list[Cached],
    layer: int,
    *,
    scale: float,
) -> list[Measured]:
    """Measure one layer's attention by its definition on the same queries and cache, request by request.

    Request boundaries come from ``batch``. ``cached`` is what the cache held before the backend was called.
    """
    measured = []
    for request, (k_SKH, v_SKH) in enumerate(cached):
        rows = slice(batch.cu_new_lens[request], batch.cu_new_lens[request + 1])
        given = q_RNH[rows], k_SKH, v_SKH
        low_RNH = low_attention(*given, scale=scale)
        high_RNH = causal_attention(*given, scale=scale, dtype=high_precision(q_RNH.dtype))
        measured.append(
            Measured(
                found=Errors.between(out_RNH[rows], high_RNH),
                low=Errors.between(low_RNH, high_RNH),
                dtype=q_RNH.dtype,
                what=f"layer {layer}, request {request}",
                position=batch.prefix_lens[request],
            )
        )
    return measured
