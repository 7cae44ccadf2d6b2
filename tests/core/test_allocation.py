"""Buckets, caches and batches beyond the memory: one refusal, with what fits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bcg_core import (
    BatchError,
    BoundaryBuffers,
    BucketError,
    KVCacheError,
    Mode,
    PagedKVCache,
    PrefillRunner,
    Workspace,
    allocation,
)

Make = Callable[..., Any]

TOO_MANY = [10**12, 2**53, 2**62, 2**63, 2**64, 10**30]
"""Beyond the memory, 2**63 bytes, 2**63 elements, and what a float holds exactly."""


@pytest.mark.parametrize("size", TOO_MANY, ids=str)
def test_a_bucket_beyond_the_memory_is_refused_with_what_fits(
    toy_model: Make, kv_cache: PagedKVCache, make_backend: Make, size: int
) -> None:
    with pytest.raises(
        BucketError,
        match=rf"^a bucket of {size} tokens takes [\d,.]+ GiB, but cpu has [\d,.]+ GiB in all: there is room for \d+ "
        "tokens at most$",
    ):
        PrefillRunner(toy_model(), kv_cache, make_backend(), buckets=[16, size])


@pytest.mark.parametrize("size", TOO_MANY, ids=str)
@pytest.mark.parametrize("owner", [Workspace, BoundaryBuffers])
def test_buffers_beyond_the_memory_are_refused(toy_model: Make, owner: Any, size: int) -> None:
    with pytest.raises(BucketError, match=f"a bucket of {size} tokens takes"):
        owner(toy_model().spec, size)


@pytest.mark.parametrize(
    ("pages", "page_size"),
    [(10**12, 4), (2**62, 4), (2**63, 4), (10**30, 4), (2, 2**62), (2, 2**63)],
    ids=str,
)
def test_a_cache_beyond_the_memory_is_refused_with_what_fits(
    toy_model: Make, pages: int, page_size: int
) -> None:
    with pytest.raises(
        KVCacheError,
        match=rf"^a KV cache of {pages} pages takes .* GiB, but cpu has .* in all: there is room for \d+ pages at most",
    ):
        PagedKVCache(toy_model().spec, num_pages=pages, page_size=page_size)


def test_what_cannot_be_addressed_is_refused_on_a_device_that_does_not_say_what_it_has(
    toy_model: Make,
) -> None:
    spec = replace(toy_model().spec, device=torch.device("meta"))
    Workspace(spec, 10**9)
    with pytest.raises(BucketError, match=r"but meta has 8,589,934,591\.9 GiB in all"):
        Workspace(spec, 2**63)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, toy_model: Make) -> Callable[[int], None]:
    """Return a function that gives the CPU as much memory as a workspace of some tokens takes."""

    def shrink(tokens: int) -> None:
        token_bytes = 4 * (64 + 32 + 16) + 3 * 8  # qkv, output, hidden; indices
        monkeypatch.setattr(allocation, "total_memory", lambda device: tokens * token_bytes)

    return shrink


def test_what_is_said_to_fit_fits(toy_model: Make, small: Callable[[int], None]) -> None:
    small(21)
    with pytest.raises(BucketError, match="room for 21 tokens at most"):
        Workspace(toy_model().spec, 22)
    assert Workspace(toy_model().spec, 21).max_tokens == 21


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_a_batch_beyond_the_buckets_and_the_memory_is_refused_and_the_runner_works_on(
    make_runner: Make, make_batch: Make, small: Callable[[int], None], mode: Mode
) -> None:
    runner, batch = make_runner(), make_batch(21)
    small(20)
    with pytest.raises(
        BatchError,
        match="21 tokens, beyond the largest bucket, need a workspace of their own: a bucket of 21 tokens "
        r".*room for 20 tokens at most; split the batch",
    ):
        runner.prefill(batch, mode=mode)
    assert batch.sequences[0].cached == 0
    assert runner.prefill(make_batch(20)).padded_tokens == 20


RAISED: dict[str, Exception] = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    "python": MemoryError(),
}


@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda spec: Workspace(spec, 8), BucketError),
        (lambda spec: BoundaryBuffers(spec, 8), BucketError),
        (lambda spec: PagedKVCache(spec, num_pages=8), KVCacheError),
    ],
    ids=["workspace", "boundary", "cache"],
)
def test_an_allocation_that_fails_is_the_same_refusal_chained_to_what_was_raised(
    toy_model: Make,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Any], Any],
    error: type[Exception],
    raised: Exception,
) -> None:
    spec = toy_model().spec
    monkeypatch.setattr(torch, "zeros", raising(raised))
    with pytest.raises(error, match=r"GiB free: there is room for \d+ (tokens|pages) at") as caught:
        make(spec)
    assert caught.value.__cause__ is raised


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return fail


def test_another_error_of_an_allocation_arrives_as_raised(
    toy_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, raised = toy_model().spec, RuntimeError("CUDA error: device-side assert triggered")
    monkeypatch.setattr(torch, "zeros", raising(raised))
    with pytest.raises(RuntimeError) as caught:
        Workspace(spec, 8)
    assert caught.value is raised


def test_a_host_whose_memory_is_unknown_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sysconf_names")
    assert allocation.total_memory(torch.device("cpu")) == 2**63 - 1


@pytest.mark.parametrize(
    ("ask", "expected"), [(allocation.total_memory, 80), (allocation.free_memory, 7)]
)
def test_a_gpu_is_asked_for_its_memory(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[torch.device], int], expected: int
) -> None:
    class Properties:
        total_memory = 80

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 80))
    assert ask(torch.device("cuda", 0)) == expected


def test_the_workspace_of_a_backend_that_does_not_fit_is_named(
    toy_model: Make, kv_cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr("bcg_backends.sdpa.SDPABackend.__init__", raising(raised))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        PrefillRunner(toy_model(), kv_cache, "sdpa", buckets=[8], max_requests=3)
    assert caught.value is raised
    assert caught.value.__notes__ == [
        "raised while making backend 'sdpa' for up to 124 tokens and 3 requests a batch"
    ]
