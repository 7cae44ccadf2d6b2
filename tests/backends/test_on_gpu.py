"""Every adapter with its real library on a real GPU, beyond what the correctness matrix asks."""

import json
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_backends.trial import Shape, Trial
from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    Chunk,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
)
from bcg_llama import PRESETS, LlamaModel, random_llama

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Vendor libraries warn of their own affairs when they are imported.
    pytest.mark.filterwarnings("ignore"),
]

ADAPTERS = {
    "sdpa": "sdpa:SDPABackend",
    "torch_varlen": "torch_varlen:TorchVarlenBackend",
    "flashinfer_fa2": "flashinfer:FlashInferFA2",
    "flashinfer_fa3": "flashinfer:FlashInferFA3",
    "flash_attn_2": "flash_attn_2:FlashAttention2",
    "flash_attn_3": "flash_attn_3:FlashAttention3",
    "flash_attn_4": "flash_attn_4:FlashAttention4",
    "xformers": "xformers:XFormersBackend",
}
LIMITS = BackendLimits(max_tokens=4096, max_requests=64, max_context=4096, num_pages=256)
PLAIN = Shape(tokens=520, requests=3, prefix_len=0)
BEHIND = Shape(tokens=332, requests=4, prefix_len=300)
SINGLE = Shape(tokens=7, requests=7, prefix_len=131)
SHAPES = {"plain": PLAIN, "prefix": BEHIND, "one-token-each": SINGLE}


@pytest.fixture(params=[64, 128], ids=["h64", "h128"])
def spec(request: pytest.FixtureRequest) -> AttentionSpec:
    return AttentionSpec(
        num_heads=32,
        num_kv_heads=8,
        head_dim=request.param,
        dtype=torch.bfloat16,
        page_size=256,
        scale=request.param**-0.5,
    )


@pytest.fixture(params=ADAPTERS)
def backend(request: pytest.FixtureRequest, spec: AttentionSpec) -> AttentionBackend:
    module, name = ADAPTERS[request.param].split(":")
    cls: type[AttentionBackend] = getattr(import_module(f"bcg_backends.{module}"), name)
    device = torch.device("cuda")
    reason = cls.unavailable() or cls.unsupported(spec, device)
    if reason is not None:
        pytest.skip(reason)
    return cls(spec, LIMITS, device)


def make(shape: Shape, backend: AttentionBackend) -> Trial:
    return Trial(shape, backend.spec, torch.device("cuda"))


def attend(trial: Trial, backend: AttentionBackend, metadata: Any) -> Tensor:
    out = trial.out_RNH if backend.capabilities.supports_out else None
    return backend.forward(trial.q_RNH, trial.k_RKH, trial.v_RKH, trial.kv_cache, 0, metadata, out)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_are_right(backend: AttentionBackend, shape: Shape) -> None:
    assert make(shape, backend).fault(backend) is None


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bucket_metadata_gives_the_same_bits(backend: AttentionBackend, shape: Shape) -> None:
    trial = make(shape, backend)
    expected = trial.run(backend, 1).clone()
    bucket = backend.init_bucket_metadata(1024)
    backend.update_bucket_metadata(bucket, make(PLAIN, backend).batch)
    metadata = backend.update_bucket_metadata(bucket, trial.batch)
    assert torch.equal(attend(trial, backend, metadata), expected)


@pytest.mark.parametrize("shapes", [(PLAIN, BEHIND), (BEHIND, SINGLE), (SINGLE, SINGLE)])
def test_two_batches_may_be_prepared_before_either_runs(
    backend: AttentionBackend, shapes: tuple[Shape, Shape]
) -> None:
    trials = [make(shape, backend) for shape in shapes]
    expected = [trial.run(backend, 1).clone() for trial in trials]
    torch.cuda._sleep(100_000_000)  # keeps the device busy while both plans are queued
    prepared = [backend.init_forward_metadata(trial.batch) for trial in trials]
    results = [
        attend(trial, backend, metadata).clone()
        for trial, metadata in zip(trials, prepared, strict=True)
    ]
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])


def test_nan_in_foreign_slots_does_no_harm_where_declared(backend: AttentionBackend) -> None:
    if not backend.capabilities.ignores_foreign_nan:
        pytest.skip("declares that it needs a finite cache")
    trial = make(BEHIND, backend)
    own = torch.zeros(trial.kv_cache.num_slots, dtype=torch.bool, device="cuda")
    own[trial.batch.kv_slots] = True
    for side in trial.kv_cache.flat(0):
        side[~own] = float("nan")
    assert trial.fault(backend) is None


# Full graphs; (cached, new) tokens of each request.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one_request": [(0, 200)],
    "one_token": [(0, 1)],
    "one_token_each": [(0, 1)] * 16,
    "fills_the_bucket": [(0, 100), (0, 28)],
    "behind_a_prefix": [(300, 60)],
    "one_token_each_behind_a_prefix": [(7, 1), (300, 1), (256, 1), (255, 1)],
    "with_and_without_a_prefix": [(0, 3), (130, 40), (0, 70), (1, 1)],
}
LARGE = [(5, 16)] * 16


def lay_out(runner: PrefillRunner, lengths: list[tuple[int, int]]) -> PrefillBatch:
    """Return a batch of requests whose prefixes ``runner`` has put into the cache."""
    random, chunks = torch.Generator().manual_seed(0), []
    for prefix, new in lengths:
        tokens = torch.randint(0, 500, (prefix + new,), generator=random)
        sequence = KVSequence()
        if prefix:
            first = Chunk(token_ids=tokens[:prefix], sequence=sequence)
            runner.prefill(PrefillBatch.from_chunks([first], runner.kv_cache), mode=Mode.EAGER)
        chunks.append(Chunk(token_ids=tokens[prefix:], sequence=sequence))
    return PrefillBatch.from_chunks(chunks, runner.kv_cache)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(params=["tiny", "tiny-h128"], scope="module")
def model(request: pytest.FixtureRequest) -> LlamaModel:
    return random_llama(PRESETS[request.param], dtype=torch.bfloat16, device="cuda")


def make_runner(model: LlamaModel, **options: Any) -> PrefillRunner:
    cache = PagedKVCache(model.spec, num_pages=64, page_size=256)
    return PrefillRunner(model, cache, "sdpa", buckets=[16, 128, 256], max_requests=16, **options)


@pytest.fixture(scope="module")
def reference(model: LlamaModel) -> PrefillRunner:
    """Return a runner without graphs, over another cache."""
    return make_runner(model)


@pytest.fixture(params=ADAPTERS, scope="module")
def full(request: pytest.FixtureRequest, model: LlamaModel) -> PrefillRunner:
    """Return a runner with full graphs of an adapter that can be captured."""
    runner = make_runner(model, full_graph=True)
    module, name = ADAPTERS[request.param].split(":")
    cls: type[AttentionBackend] = getattr(import_module(f"bcg_backends.{module}"), name)
    spec, device = runner.backend.spec, model.spec.device
    reason = cls.unavailable() or cls.unsupported(spec, device)
    if reason is not None:
        pytest.skip(reason)
    backend = cls(spec, runner.limits, device)
    reason = backend.refuse_full_graph()
    if reason is not None:
        pytest.skip(reason)
    runner.use_backend(backend)
    report = runner.capture()
    assert [(bucket.segments, bucket.breaks) for bucket in report.buckets] == [(1, 0)] * 3
    return runner


def free(batch: PrefillBatch) -> None:
    for sequence in batch.sequences:
        batch.kv_cache.free(sequence)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_full_graphs_agree_with_padded_eager(
    full: PrefillRunner, reference: PrefillRunner, lengths: list[tuple[int, int]]
) -> None:
    """Off by at most twice what sdpa is off, which rounds as well, plus one rounding step; zero where padded."""
    larger = lay_out(full, LARGE)
    full.prefill(larger)
    free(larger)
    batch, again = lay_out(full, lengths), lay_out(reference, lengths)
    eager = full.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD.clone()
    other = reference.prefill(again, mode=Mode.PADDED_EAGER).hidden_RD
    full.workspace.boundary.fill_(float("nan"))
    result = full.prefill(batch)
    free(batch)
    free(again)
    budget = 2 * error(other, eager) + torch.finfo(torch.bfloat16).eps / 2
    assert error(result.hidden_RD, eager) <= budget
    padded = full.workspace.boundary.out_MX[batch.num_tokens : result.admission.bucket]
    assert not padded.any()


VENDOR_CALLS = {
    "torch_varlen": "_attend",
    "flash_attn_2": "_varlen_fwd",
    "flash_attn_3": "_fwd",
    "flash_attn_4": "_fwd",
    "xformers": "_attend",
}


def bare_call(trial: Trial, backend: AttentionBackend, metadata: Any) -> Callable[[], Any]:
    """Return the library call that ``forward`` makes, with the very arguments that it passes."""
    owner: Any = backend if backend.name in VENDOR_CALLS else metadata.wrapper
    name = VENDOR_CALLS.get(backend.name, "run")
    function, calls = getattr(owner, name), []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(partial(function, *args, **kwargs))
        return function(*args, **kwargs)

    setattr(owner, name, record)
    try:
        attend(trial, backend, metadata)
    finally:
        setattr(owner, name, function)
    return calls[0]


def microseconds(call: Callable[[], Any], repeats: int = 100) -> float:
    torch.cuda.synchronize()
    begun = perf_counter()
    for _ in range(repeats):
        call()
    elapsed = perf_counter() - begun
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


@pytest.mark.parametrize("shape", [SINGLE, Shape(tokens=7, requests=7, prefix_len=0)], ids=str)
def test_forward_costs_the_host_little_more_than_the_library(
    backend: AttentionBackend, shape: Shape
) -> None:
    """Within 15 % and 2 us of the bare call, side by side; gathering keys is work of its own and not compared."""
    if backend.name == "sdpa":
        pytest.skip("makes one call a request: there is no single library call to compare with")
    trial = make(shape, backend)
    metadata = backend.init_forward_metadata(trial.batch)
    if getattr(metadata, "slots_S", None) is not None:
        pytest.skip("gathers keys first")
    bare, ours = bare_call(trial, backend, metadata), partial(attend, trial, backend, metadata)
    for call in (bare, ours):
        microseconds(call)
    rounds = [(microseconds(bare), microseconds(ours)) for _ in range(15)]
    library, adapter = (median(column) for column in zip(*rounds, strict=True))
    folder = os.environ.get("BCG_RESULTS")
    if folder:
        record = {
            "backend": backend.name,
            "head_dim": backend.spec.head_dim,
            "shape": str(shape),
            "library_us": round(library, 2),
            "forward_us": round(adapter, 2),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        with (Path(folder) / "host-cost.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    assert adapter <= 1.15 * library + 2


# NaN that others left


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("page_size", [16, 128, 256])
@pytest.mark.parametrize("length", [1, 3, 17, 127, 128, 129, 200])
@pytest.mark.parametrize("spoilt", [7, 0], ids=["earlier_owner", "padded_rows"])
def test_nan_of_an_earlier_owner_or_of_padded_rows_reaches_nobody(
    model: LlamaModel, name: str, page_size: int, length: int, spoilt: int
) -> None:
    """Token 0 is what padded rows are: page 0, which page tables are padded with, holds NaN then."""
    module, _, cls = ADAPTERS[name].partition(":")
    backend_type: type[AttentionBackend] = getattr(import_module(f"bcg_backends.{module}"), cls)
    if (missing := backend_type.unavailable()) is not None:
        pytest.skip(missing)
    cache = PagedKVCache(model.spec, num_pages=64, page_size=page_size)
    spec = AttentionSpec.of(model.spec, page_size=page_size)
    refusal = backend_type.capabilities.refuse(spec, cache.device)
    if refusal is not None:
        pytest.skip(refusal)
    runner = PrefillRunner(model, cache, "sdpa", buckets=[16, 256], max_requests=16)
    runner.use_backend(backend_type(spec, runner.limits, cache.device))
    runner.capture()
    embedding_VD = model.weights.embedding_VD
    kept = embedding_VD[spoilt].clone()
    embedding_VD[spoilt] = float("nan")
    try:
        if spoilt:
            first = KVSequence()
            chunk = Chunk(token_ids=[1] + [spoilt] * 250, sequence=first)
            runner.prefill(PrefillBatch.from_chunks([chunk], cache))
            cache.free(first)
        chunks = [Chunk(token_ids=[2] * n, sequence=KVSequence()) for n in (length, 5)]
        result = runner.prefill(PrefillBatch.from_chunks(chunks, cache))
        assert result.hidden_RD.isfinite().all()
    finally:
        embedding_VD[spoilt] = kept
