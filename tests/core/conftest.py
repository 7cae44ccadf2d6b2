"""What tests of the core share: a capture in one call, a comparison of bits, a toy model and a toy backend.

Shape letters: T bucket (padded) tokens, R real tokens, D model dim, N query heads, K KV heads, H head dim, S keys.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Capabilities,
    Chunk,
    CPUSegmentEngine,
    ForwardContext,
    KVSequence,
    ModelSpec,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    TokenBuckets,
)


def bits(tensor: Tensor) -> bytes:
    """Return the elements as bytes, so that NaN equals NaN and -0 differs from 0."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Keep small work quick on a busy machine: one thread, and torch left out of garbage collections."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture
def assert_same_bits() -> Callable[[Any, Any], None]:
    """Return a check that two trees of tensors have the same structure, shapes, dtypes and bits."""

    def check(actual: Any, expected: Any) -> None:
        found, found_structure = pytree.tree_flatten(actual)
        wanted, wanted_structure = pytree.tree_flatten(expected)
        assert found_structure == wanted_structure
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted]
        assert [bits(t) for t in found] == [bits(t) for t in wanted]

    return check


@pytest.fixture
def engine() -> CPUSegmentEngine:
    return CPUSegmentEngine()


@pytest.fixture
def graph(engine: CPUSegmentEngine) -> BreakableCUDAGraph:
    return BreakableCUDAGraph(engine)


@pytest.fixture
def capture(engine: CPUSegmentEngine) -> Callable[..., tuple[BreakableCUDAGraph, Any]]:
    """Return a function that captures a call and returns the graph and what the call returned."""

    def run(fn: Callable[..., Any], *args: Any) -> tuple[BreakableCUDAGraph, Any]:
        graph = BreakableCUDAGraph(engine)
        with torch.no_grad(), BreakableCUDAGraphCapture(graph):
            result = fn(*args)
        return graph, result

    return run


class ToyModel:
    """The smallest model with everything a capture meets: embedding, positions, attention, residual."""

    def __init__(
        self, *, layers: int = 2, max_positions: int = 64, device: str | torch.device = "cpu"
    ) -> None:
        self.spec = ModelSpec(
            num_layers=layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            hidden_size=16,
            vocab_size=61,
            max_positions=max_positions,
            dtype=torch.float32,
            device=torch.device(device),
        )
        random = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(device)

        self.embedding_VD = normal(61, 16)
        self.table_S = 1 + normal(max_positions) / 8
        self.qkv_DX = [normal(16, 64) / 4 for _ in range(layers)]
        self.out_YD = [normal(32, 16) / 4 for _ in range(layers)]
        self.calls = 0

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        self.calls += 1
        x_TD = self.embedding_VD.index_select(0, input_ids_T)
        turn_T11 = self.table_S.index_select(0, positions_T)[:, None, None]
        for layer, (qkv_DX, out_YD) in enumerate(zip(self.qkv_DX, self.out_YD, strict=True)):
            torch.mm(x_TD, qkv_DX, out=ctx.io.qkv_TX)
            ctx.io.qk_TAH.mul_(turn_T11)
            ctx.attend(layer)
            x_TD = torch.tanh(x_TD + torch.mm(ctx.io.out_TX, out_YD))
        return x_TD

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        return hidden_BD @ self.embedding_VD.t()


class ToyBackend(AttentionBackend):
    """Attend over the cache request by request, note what it is given, and do what a test asks for.

    ``seen`` lists (layer, rows of q, batch) of each forward, ``prepared`` the batches metadata was made for;
    ``before_forward`` is called with the layer.
    """

    name = "toy"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32}),
        head_dims=None,
        devices=frozenset({"cpu"}),
        gqa=True,
        cached_prefix=True,
        supports_out=True,
        needs_host_plan=False,
        deterministic=True,
    )

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self.seen: list[tuple[int, int, PrefillBatch]] = []
        self.prepared: list[PrefillBatch] = []
        self.before_forward: Callable[[int], None] = lambda layer: None

    def init_forward_metadata(self, batch: PrefillBatch) -> PrefillBatch:
        self.prepared.append(batch)
        return batch

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: PrefillBatch,
        out_RNH: Tensor | None,
    ) -> Tensor:
        self.seen.append((layer, q_RNH.shape[0], metadata))
        self.before_forward(layer)
        out_RNH = torch.empty(q_RNH.shape) if out_RNH is None else out_RNH
        for request, prefix in enumerate(metadata.prefix_lens):
            rows = slice(metadata.cu_new_lens[request], metadata.cu_new_lens[request + 1])
            pages = metadata.page_table_BW[request].long()
            keys, values = (
                side[pages].flatten(0, 1)[: metadata.kv_lens[request]].repeat_interleave(2, dim=1)
                for side in (kv_cache.keys(layer), kv_cache.values(layer))
            )
            logits = torch.einsum("qnh,snh->nqs", q_RNH[rows], keys) * self.spec.scale
            future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(prefix + 1)
            weights = logits.masked_fill(future, float("-inf")).softmax(-1)
            out_RNH[rows] = torch.einsum("nqs,snh->qnh", weights, values)
        return out_RNH


@pytest.fixture
def toy_model() -> type[ToyModel]:
    return ToyModel


@pytest.fixture
def toy_backend() -> type[ToyBackend]:
    return ToyBackend


@pytest.fixture
def kv_cache() -> PagedKVCache:
    """Return a cache of 31 usable pages of 4 tokens, shaped for the toy model."""
    return PagedKVCache(ToyModel().spec, num_pages=32, page_size=4)


@pytest.fixture
def make_backend() -> Callable[..., AttentionBackend]:
    """Return a function that makes a backend for the toy model and pages of 4 tokens."""

    def make(cls: type[AttentionBackend] = ToyBackend, **options: Any) -> AttentionBackend:
        spec = AttentionSpec.of(ToyModel().spec, page_size=4)
        limits = BackendLimits(max_tokens=124, max_requests=8, max_context=64, num_pages=32)
        return cls(spec, limits, torch.device("cpu"), **options)

    return make


@pytest.fixture
def make_runner(
    kv_cache: PagedKVCache, make_backend: Callable[..., AttentionBackend]
) -> Callable[..., PrefillRunner]:
    """Return a function that makes a runner of the toy model, captured unless told otherwise."""

    def make(
        *,
        model: ToyModel | None = None,
        kv_cache: PagedKVCache = kv_cache,
        backend: AttentionBackend | None = None,
        buckets: Sequence[int] = (8, 16),
        captured: bool = True,
        **arguments: Any,
    ) -> PrefillRunner:
        arguments.setdefault("max_requests", 8)
        runner = PrefillRunner(
            model or ToyModel(),
            kv_cache,
            backend or make_backend(),
            buckets=TokenBuckets(buckets),
            **arguments,
        )
        if captured:
            runner.capture()
        return runner

    return make


@pytest.fixture
def make_batch(kv_cache: PagedKVCache) -> Callable[..., PrefillBatch]:
    """Return a function that makes a batch of new requests of the given lengths; tokens depend on ``seed``."""

    def make(*lengths: int, seed: int = 0) -> PrefillBatch:
        return PrefillBatch.from_chunks(
            [chunk(n, seed=seed + b) for b, n in enumerate(lengths)], kv_cache
        )

    return make


def chunk(length: int, *, sequence: KVSequence | None = None, seed: int = 0) -> Chunk:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (length,), generator=random).tolist()
    return Chunk(token_ids=tokens, sequence=sequence or KVSequence())


@pytest.fixture
def make_chunk() -> Callable[..., Chunk]:
    """Return a function that makes a chunk of random tokens, for a new request unless given a sequence."""
    return chunk
