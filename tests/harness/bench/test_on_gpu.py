"""The speed harness with real graphs: where lost host time shows, and what the profiler sees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bcg_backends.sdpa import SDPABackend
from bcg_core import TokenBuckets
from bcg_harness.bench.bench import Bench
from bcg_harness.bench.cell import Cell, Status
from bcg_harness.bench.device_times import profile_cells
from bcg_harness.bench.families import parse_workload
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.overhead import measure_break_overhead
from bcg_harness.bench.runner_modes import Breakable, Eager, Full, PaddedEager
from bcg_harness.candidates import Candidate
from bcg_harness.testing import MaskBackend, SlowBackend
from bcg_harness.tokens import RandomTokens
from bcg_llama import PRESETS, random_llama

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),
]

WAIT = 50e-6
LAYERS = 16
MODES: list[type[ExecutionMode]] = [Eager, PaddedEager, Breakable, Full]


def slow(inner: type[Any]) -> type[SlowBackend]:
    class Slow(SlowBackend):
        name = f"slow {inner.name}"
        capabilities = inner.capabilities

        def __init__(self, *arguments: Any) -> None:
            super().__init__(inner(*arguments), WAIT)

    return Slow


@pytest.fixture(scope="module")
def cells() -> dict[tuple[str, str], Cell]:
    """Return the cells of two backends, each as it is and slowed down, by label and mode."""
    model = random_llama(
        replace(PRESETS["tiny"], num_layers=LAYERS), dtype=torch.bfloat16, device="cuda"
    )
    bench = Bench(
        model,
        [parse_workload("single-64")],
        MODES,
        RandomTokens(model.spec.vocab_size),
        buckets=TokenBuckets([16, 64]),
        page_size=16,
    )
    candidates = [
        candidate
        for backend in (SDPABackend, MaskBackend)
        for candidate in (
            Candidate(name=backend.name, backend=backend),
            Candidate(name=f"slow {backend.name}", backend=slow(backend)),
        )
    ]
    cells = list(bench.cells(candidates))
    bench.arena.leave()
    overhead = measure_break_overhead(bench.ground)
    assert overhead is not None
    assert 0 < overhead.host_per_break < WAIT
    cells, timelines = profile_cells(bench, candidates, cells)
    assert [line.backend for line in timelines] == [candidate.label for candidate in candidates]
    return {(cell.backend, cell.mode): cell for cell in cells}


def added(
    cells: dict[tuple[str, str], Cell], mode: str, of: Callable[[Cell], float], name: str = "sdpa"
) -> float:
    return of(cells[f"slow {name}", mode]) - of(cells[name, mode])


def test_everything_is_measured(cells: dict[tuple[str, str], Cell]) -> None:
    wrong = {key: cell.reason for key, cell in cells.items() if cell.status is not Status.MEASURED}
    assert set(wrong) == {("sdpa", "full"), ("slow sdpa", "full")}


@pytest.mark.parametrize("mode", ["eager", "padded_eager", "breakable"])
def test_lost_host_time_shows_in_enqueue(cells: dict[tuple[str, str], Cell], mode: str) -> None:
    extra = added(cells, mode, lambda cell: cell.enqueue.median)  # type: ignore[union-attr]
    assert 0.7 * LAYERS * WAIT < extra < 1.5 * LAYERS * WAIT


@pytest.mark.parametrize("mode", ["eager", "padded_eager", "breakable", "full"])
def test_lost_host_time_does_not_show_as_work_of_the_device(
    cells: dict[tuple[str, str], Cell], mode: str
) -> None:
    fast, slowed = cells["mask", mode].device, cells["slow mask", mode].device
    assert fast is not None
    assert slowed is not None
    assert slowed.busy == pytest.approx(fast.busy, rel=0.15)
    assert (slowed.launches, slowed.kernels) == (fast.launches, fast.kernels)


def test_a_full_graph_loses_nothing_to_a_slow_host(cells: dict[tuple[str, str], Cell]) -> None:
    extra = added(cells, "full", lambda cell: cell.latency.median, "mask")  # type: ignore[union-attr]
    assert extra < 0.2 * LAYERS * WAIT


def test_lost_host_time_widens_the_gap_of_breakable(cells: dict[tuple[str, str], Cell]) -> None:
    assert added(cells, "breakable", lambda cell: cell.device.gap) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["eager", "padded_eager", "breakable"])
def test_the_device_is_never_busy_for_longer_than_the_prefill_takes(
    cells: dict[tuple[str, str], Cell], mode: str
) -> None:
    cell = cells["sdpa", mode]
    assert cell.device is not None
    assert cell.latency is not None
    assert 0 < cell.device.busy < 1.1 * cell.latency.median


def test_replays_take_fewer_launches(cells: dict[tuple[str, str], Cell]) -> None:
    eager, replay = cells["sdpa", "eager"].device, cells["sdpa", "breakable"].device
    full = cells["mask", "full"].device
    assert eager is not None
    assert replay is not None
    assert full is not None
    assert eager.launches > replay.launches > full.launches
    assert replay.launches > LAYERS
