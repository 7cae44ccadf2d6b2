"""Prefill under pytest-benchmark: a group for each backend and workload, a row for each mode."""

from time import perf_counter
from typing import Any

import pytest
import torch

from bcg_core import PrefillBatch
from bcg_harness.bench.bench import Bench
from bcg_harness.bench.cell import NO_BACKEND, Status
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.bench.timing import Effort, synchronise
from bcg_harness.candidates import Candidate
from bcg_harness.typed_json import to_json

_WARM_UP = 2
_NEVER = ("speedup", "device")
"""Measures of a cell that need other modes beside it, or a profile."""


def synchronised() -> float:
    """Read the clock once the current device has done all work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()


def _setup(bench: Bench, backend: str, mode: str) -> ModeSetup:
    """Return what it took to make a mode ready; one that took nothing is not kept."""
    found = (s for s in bench.setups if s.mode == mode and s.backend in (backend, NO_BACKEND))
    return next(found, ModeSetup(backend=backend, mode=mode))


@pytest.mark.benchmark(timer=synchronised, disable_gc=True)
def test_prefill(
    benchmark: Any,
    bench: Bench,
    bcg_backend: Candidate,
    bench_ready: ExecutionMode,
    bench_workload: str,
) -> None:
    """Check and measure the mode as ``bcg bench`` does, but for the profile, and let pytest-benchmark time it."""
    workload = next((each for each in bench.workloads if each.name == bench_workload), None)
    if workload is None:
        pytest.skip(f"{bench_workload} is beyond the context of the model")
    run = bench.enter(bcg_backend.label, workload)
    cell = run.measure([bench_ready], Effort())[0]
    if cell.status is Status.UNAVAILABLE:
        pytest.skip(cell.reason)
    if cell.latency is None:
        pytest.fail(cell.reason, pytrace=False)
    benchmark.group = f"{bcg_backend.label} {bench_workload}"
    measures = {name: value for name, value in cell.to_json().items() if name not in _NEVER}
    setup = _setup(bench, bcg_backend.label, bench_ready.name)
    benchmark.extra_info.update({**measures, "setup": to_json(setup)})

    def fresh_batches() -> tuple[tuple[list[PrefillBatch]], dict[str, Any]]:
        batches = [scene.batch() for scene in run.timed]
        for batch in batches:
            bench_ready.stage(batch)
        return (batches,), {}

    def prefill(batches: list[PrefillBatch]) -> None:
        for batch in batches:
            bench_ready.prefill(batch)
            synchronise(bench.ground.device)

    benchmark.pedantic(
        prefill,
        setup=fresh_batches,
        rounds=cell.latency.samples,
        warmup_rounds=_WARM_UP,
        iterations=1,
    )
