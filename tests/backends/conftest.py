"""What tests of backends share: requests in a paged cache, and attention in float64 to compare with.

Shape letters: R real tokens, N query heads, K KV heads, H head dim, Q new tokens and S keys of one request.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
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
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep small work quick on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Requests whose keys and values, prefixes included, lie in a paged cache, and queries for them."""

    spec: AttentionSpec
    kv_cache: PagedKVCache
    batch: PrefillBatch
    q_RNH: Tensor
    k_RKH: Tensor
    v_RKH: Tensor

    def attend(self, backend: AttentionBackend, layer: int = 0) -> Tensor:
        """Return what ``backend`` computes for this batch, ``[R, N, H]``."""
        metadata = backend.init_forward_metadata(self.batch)
        return backend.forward(
            self.q_RNH, self.k_RKH, self.v_RKH, self.kv_cache, layer, metadata, None
        )

    def expected(self, layer: int = 0) -> Tensor:
        """Return the same in float64, by the definition, request by request."""
        keys, values = (side.double() for side in self.kv_cache.flat(layer))
        slots = self.batch.kv_slots
        outputs = []
        for b, prefix in enumerate(self.batch.prefix_lens):
            rows = slice(self.batch.cu_new_lens[b], self.batch.cu_new_lens[b + 1])
            own = slots[self.batch.cu_kv_lens[b] : self.batch.cu_kv_lens[b + 1]]
            outputs.append(naive(self.q_RNH[rows], keys[own], values[own], prefix, self.spec))
        return torch.cat(outputs)

    def make(self, cls: type[AttentionBackend]) -> AttentionBackend:
        limits = BackendLimits(max_tokens=1024, max_requests=64, max_context=512, num_pages=256)
        return cls(self.spec, limits, self.kv_cache.device)


def naive(
    q_QNH: Tensor, keys_SKH: Tensor, values_SKH: Tensor, prefix: int, spec: AttentionSpec
) -> Tensor:
    """Attend by the definition: new token i sees the prefix and new tokens 0 to i."""
    head = torch.arange(spec.num_heads) // spec.group_size
    logits_NQS = torch.einsum("qnh,snh->nqs", q_QNH.double(), keys_SKH[:, head]) * spec.scale
    seen_QS = torch.arange(len(keys_SKH)) <= prefix + torch.arange(len(q_QNH))[:, None]
    logits_NQS = logits_NQS.masked_fill(~seen_QS.to(q_QNH.device), float("-inf"))
    return torch.einsum("nqs,snh->qnh", logits_NQS.softmax(-1), values_SKH[:, head])


@pytest.fixture
def make_scene() -> Callable[..., Scene]:
    """Return a function that lays out requests of (prefix, new) tokens with random content."""

    def make(
        lengths: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        device: str = "cpu",
        seed: int = 0,
    ) -> Scene:
        num_heads, num_kv_heads = heads
        model = ModelSpec(
            num_layers=2,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=num_heads * head_dim,
            vocab_size=10,
            max_positions=512,
            dtype=dtype,
            device=torch.device(device),
        )
        random = torch.Generator().manual_seed(seed)
        pages = sum(-(-(prefix + new) // page_size) for prefix, new in lengths)
        cache = PagedKVCache(model, num_pages=pages + 3, page_size=page_size)
        content = torch.randn(cache.storage_L2PSKH.shape, generator=random)
        cache.storage_L2PSKH.copy_(content)
        cache.storage_L2PSKH[:, :, 0] = float("nan")
        batch = PrefillBatch.from_chunks(
            [scattered(cache, prefix, new) for prefix, new in lengths], cache
        )
        keys, values = cache.flat(0)
        slots = batch.slot_mapping_R.to(device)
        fused = torch.empty(
            batch.num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device
        )
        q_RNH, k_RKH, v_RKH = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q_RNH.copy_(torch.randn(q_RNH.shape, generator=random))
        k_RKH.copy_(keys[slots])
        v_RKH.copy_(values[slots])
        return Scene(
            spec=AttentionSpec.of(model, page_size=page_size),
            kv_cache=cache,
            batch=batch,
            q_RNH=q_RNH,
            k_RKH=k_RKH,
            v_RKH=v_RKH,
        )

    return make


def scattered(kv_cache: PagedKVCache, prefix: int, new: int) -> Chunk:
    """Return a chunk of ``new`` tokens behind ``prefix`` cached ones, on pages that are not in order."""
    sequence = KVSequence(cached=prefix)
    kv_cache.extend(sequence, prefix + new)
    sequence.pages.reverse()
    return Chunk(token_ids=[1] * new, sequence=sequence)
