"""Try backends on a batch of made-up tokens: is the result right, and how long does it take.

Shape letters: R real tokens, B requests, S keys of one request, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    Chunk,
    KVSequence,
    ModelSpec,
    PagedKVCache,
    PrefillBatch,
    causal_attention,
    low_attention,
)

LAYERS = 16
"""Layers over which the preparation of a batch is spread when backends are compared."""
_REPEATS = 5
_SIZES = 8
_MANY = 16
_CHECKED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describe batches that are served alike.

    Attributes:
        tokens: R, new tokens.
        requests: B, requests of about equal length.
        prefix_len: cached tokens of each request.
    """

    tokens: int
    requests: int
    prefix_len: int

    def __str__(self) -> str:
        """Describe the shape in words."""
        plural = "s" if self.requests > 1 else ""
        behind = f" behind {self.prefix_len} cached" if self.prefix_len else ""
        return f"{self.tokens} tokens in {self.requests} request{plural}{behind}"

    @property
    def new_lens(self) -> list[int]:
        """Return the new tokens of each request."""
        each, rest = divmod(self.tokens, self.requests)
        return [each + (number < rest) for number in range(self.requests)]

    def distance(self, batch: PrefillBatch) -> tuple[bool, bool, int, int]:
        """Order shapes by how far they are from ``batch``: a prefix or none, large enough, tokens, requests."""
        return (
            (self.prefix_len > 0) != any(batch.prefix_lens),
            self.tokens < batch.num_tokens,
            abs(self.tokens - batch.num_tokens),
            abs(self.requests - batch.num_requests),
        )


def shapes_of(batches: Sequence[PrefillBatch], limits: BackendLimits) -> list[Shape]:
    """Return what to try so that the sizes of ``batches`` are covered, with one and many requests and a prefix."""
    sizes = sorted({batch.num_tokens for batch in batches})
    step = -(-len(sizes) // _SIZES)
    prefix = max((max(batch.prefix_lens) for batch in batches), default=0)
    shapes = []
    for tokens in sizes[::-1][::step]:
        most = min(_MANY, tokens, limits.max_requests)
        for requests in sorted({1, most}):
            longest = limits.max_context - -(-tokens // requests)
            shapes += [
                Shape(tokens=tokens, requests=requests, prefix_len=length)
                for length in sorted({0, prefix})
                if length <= longest
            ]
    return shapes


class Trial:
    """Hold a batch of one shape, random rows for it, and a KV cache of one layer that holds its keys.

    Args:
        shape: of the batch.
        spec: of the attention.
        device: where tensors live.
    """

    def __init__(self, shape: Shape, spec: AttentionSpec, device: torch.device) -> None:
        self.shape = shape
        self.spec = spec
        self.device = device
        pages = [-(-(shape.prefix_len + new) // spec.page_size) for new in shape.new_lens]
        model = ModelSpec(
            num_layers=1,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            hidden_size=spec.head_dim,
            vocab_size=1,
            max_positions=1,
            dtype=spec.dtype,
            device=device,
        )
        self.kv_cache = PagedKVCache(model, num_pages=sum(pages) + 1, page_size=spec.page_size)
        sequences = [KVSequence() for _ in pages]
        for sequence in sequences:
            self.kv_cache.extend(sequence, shape.prefix_len)
            self.kv_cache.mark_written(sequence, shape.prefix_len)
        self.batch = PrefillBatch.from_chunks(
            [
                Chunk(token_ids=[0] * new, sequence=sequence)
                for new, sequence in zip(shape.new_lens, sequences, strict=True)
            ],
            self.kv_cache,
        )
        generator = torch.Generator(device).manual_seed(0)
        self.kv_cache.storage_L2PSKH.normal_(generator=generator)
        keys, values = self.kv_cache.flat(0)
        slots_R = self.batch.slot_mapping_R.to(device)
        self.k_RKH, self.v_RKH = keys[slots_R], values[slots_R]
        self.q_RNH = torch.randn(
            shape.tokens,
            spec.num_heads,
            spec.head_dim,
            dtype=spec.dtype,
            device=device,
            generator=generator,
        )
        self.out_RNH = torch.empty_like(self.q_RNH)

    def run(self, backend: AttentionBackend, layers: int) -> Tensor:
        """Prepare the batch with ``backend`` and attend ``layers`` times; returns the last result."""
        metadata = backend.init_forward_metadata(self.batch)
        out_RNH = self.out_RNH if backend.capabilities.supports_out else None
        for _ in range(layers):
            result = backend.forward(
                self.q_RNH, self.k_RKH, self.v_RKH, self.kv_cache, 0, metadata, out_RNH
            )
            if result is not self.out_RNH:
                self.out_RNH.copy_(result)
        return self.out_RNH

    def fault(self, backend: AttentionBackend) -> str | None:
        """Say what is wrong with the result of ``backend``; None when it is right, or too large to be checked.

        Right is a relative L2 error, against attention in float64, of at most twice what ``low_attention`` makes, plus
        one rounding step.
        """
        if self.shape.tokens > _CHECKED_TOKENS:
            return None
        exact, low = (
            self._defined(causal_attention, dtype=torch.float64),
            self._defined(low_attention),
        )
        budget = 2 * _error(low, exact) + torch.finfo(self.spec.dtype).eps / 2
        try:
            error = _error(self.run(backend, 1), exact)
        except Exception as failure:  # noqa: BLE001  # a candidate that fails is left out, whatever it raises
            return f"raised {failure!r}"
        if isfinite(error) and error <= budget:
            return None
        return f"error {error:.2g} exceeds {budget:.2g}"

    def _defined(self, attention: Callable[..., Tensor], **options: Any) -> Tensor:
        """Compute the whole batch with ``attention``, request by request."""
        keys, values = self.kv_cache.flat(0)
        outputs = []
        rows = zip(
            self.q_RNH.split(self.batch.new_lens),
            self.batch.kv_slots.split(self.batch.kv_lens),
            strict=True,
        )
        for q_RNH, slots_S in rows:
            outputs.append(
                attention(q_RNH, keys[slots_S], values[slots_S], scale=self.spec.scale, **options)
            )
        return torch.cat(outputs)

    def seconds(self, backend: AttentionBackend) -> float:
        """Return the median wall-clock time of one preparation and ``LAYERS`` layers, synchronised."""
        times = []
        for _ in range(_REPEATS):
            self._synchronise()
            begun = perf_counter()
            self.run(backend, LAYERS)
            self._synchronise()
            times.append(perf_counter() - begun)
        return median(times)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _error(actual: Tensor, exact: Tensor) -> float:
    difference = actual.double() - exact.double()
    return float(difference.norm() / exact.double().norm())
