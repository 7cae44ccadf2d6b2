"""Prefill under pytest-benchmark: a group for each backend and workload, a row for each mode."""

from time import perf_counter
from typing import Any

import pytest
import torch

from bcg_core import PrefillBatch
from bcg_harness.bench.bench import Bench
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.record import Status
from bcg_harness.bench.timing import Effort
from bcg_harness.bench.workloads import Workload
from bcg_harness.candidates import Candidate

_WARM_UP = 2


def synchronised() -> float:
    """Read the clock once the device has done all work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


@pytest.mark.benchmark(timer=synchronised, disable_gc=True)
def test_prefill(
    benchmark: Any,
    bench: Bench,
    bcg_backend: Candidate,
    bench_ready: ExecutionMode,
    bench_workload: Workload,
) -> None:
    """Check and measure the mode as ``bcg bench`` does, but for the profile, and let pytest-benchmark time it."""
    if bench_workload.longest > bench.ground.model.spec.max_positions:
        pytest.skip(f"{bench_workload.longest} tokens are beyond the context of the model")
    run = bench.enter(bcg_backend.label, bench_workload)
    cell = run.measure([bench_ready], Effort())[0]
    if cell.status is Status.UNAVAILABLE:
        pytest.skip(cell.reason)
    if cell.latency is None:
        pytest.fail(cell.reason, pytrace=False)
    benchmark.group = f"{bcg_backend.label} {bench_workload.name}"
    benchmark.extra_info.update(cell.to_json())

    def fresh_batches() -> tuple[tuple[list[PrefillBatch]], dict[str, Any]]:
        batches = [scene.batch() for scene in run.timed]
        for batch in batches:
            bench_ready.stage(batch)
        return (batches,), {}

    def prefill(batches: list[PrefillBatch]) -> None:
        for batch in batches:
            bench_ready.prefill(batch)

    benchmark.pedantic(
        prefill,
        setup=fresh_batches,
        rounds=cell.latency.samples,
        warmup_rounds=_WARM_UP,
        iterations=1,
    )
