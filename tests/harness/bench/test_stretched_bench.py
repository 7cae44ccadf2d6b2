"""A long workload is measured stretch by stretch, in the pages of the requests that are there at once."""

from collections.abc import Callable
from typing import ClassVar, Self

import pytest

from bcg_core import PagedKVCache, TokenBuckets
from bcg_harness import Case
from bcg_harness.bench import device_times
from bcg_harness.bench.arena import Arena, Scene
from bcg_harness.bench.bench import Bench
from bcg_harness.bench.cell import Cell, Status
from bcg_harness.bench.device_times import profile_cells
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.profiling import Activity, Pass
from bcg_harness.bench.runner_modes import Breakable, Eager, Full, PaddedEager
from bcg_harness.bench.scheduler import Request, pack
from bcg_harness.bench.timing import Effort
from bcg_harness.bench.workloads import Workload
from bcg_harness.candidates import Candidate
from bcg_harness.progress import NoProgress
from bcg_harness.testing import IgnoresPrefix, MaskBackend
from bcg_harness.testing.faulty_modes import RefusesPrefixes
from bcg_harness.tokens import RandomTokens
from bcg_llama import LlamaModel

MASK = Candidate(name="mask", backend=MaskBackend)
STRETCH = 40


def traffic(count: int, *, prefixed: int | None = None, holds: float = 0.0) -> Workload:
    """Return requests of 40 tokens, one a second and a stretch each, one of them behind a prefix of 30."""
    requests = [
        Request(
            prompt_tokens=40,
            prefix_tokens=30 if number == prefixed else 0,
            arrival_seconds=float(number),
        )
        for number in range(count)
    ]
    steps = pack(requests, token_budget=64, max_requests=4, stretch_tokens=STRETCH)
    return Workload(
        case=Case(name="traffic", description="", steps=steps),
        arrivals={number: float(number) for number in range(count)},
        leaves={number: number + holds for number in range(count)},
        stretch_tokens=STRETCH,
    )


class Told(NoProgress):
    """Count what was said to be done."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.done = 0

    def start(self, what: str, total: int) -> None:
        self.totals[what] = total

    def advance(self, count: int = 1) -> None:
        self.done += count


@pytest.fixture
def make(two_layers: LlamaModel) -> Callable[..., Bench]:
    def make(workload: Workload, *modes: type[ExecutionMode], told: Told | None = None) -> Bench:
        return Bench(
            two_layers,
            [workload],
            modes,
            RandomTokens(two_layers.spec.vocab_size),
            buckets=TokenBuckets([16, 64]),
            page_size=16,
            effort=Effort(seconds=0.0, least=3, most=3),
            progress=told,
        )

    return make


def cells_of(bench: Bench, candidate: Candidate = MASK) -> dict[str, Cell]:
    return {cell.mode: cell for cell in bench.cells([candidate])}


def test_every_mode_is_measured_over_all_stretches(make: Callable[..., Bench]) -> None:
    cells = cells_of(make(traffic(6, prefixed=4), Eager, PaddedEager, Breakable, Full))
    assert {cell.status for cell in cells.values()} == {Status.MEASURED}
    for cell in cells.values():
        assert len(cell.step_latency) == 6
        assert cell.real_tokens == 240
        assert sum(cell.served.values()) == 6
        assert cell.latency is not None
        assert cell.latency.samples == 3
    assert cells["breakable"].padded_tokens == 6 * 64


def test_latency_is_that_of_all_stretches(make: Callable[..., Bench]) -> None:
    cell = cells_of(make(traffic(6), Eager))["eager"]
    assert cell.latency is not None
    assert cell.latency.median >= 5 * min(cell.step_latency)


def test_the_cache_has_room_for_the_requests_that_are_there_at_once(
    make: Callable[..., Bench],
) -> None:
    pages = {
        count: make(traffic(count, holds=1.5), Eager).ground.kv_cache.num_pages
        for count in (3, 100)
    }
    assert pages == {3: 7, 100: 7}  # two requests of three pages, and page 0


def test_pages_change_hands_between_stretches(
    make: Callable[..., Bench], two_layers: LlamaModel
) -> None:
    workload = traffic(5, holds=1.5)
    cache = PagedKVCache(two_layers.spec, num_pages=workload.kv_pages(16) + 1, page_size=16)
    arena = Arena(cache, RandomTokens(100))
    free = []
    for scenes in arena.enter(workload):
        for scene in scenes:
            scene.batch()
        free.append(cache.free_pages)
    assert free == [3, 0, 0, 0, 0]
    arena.leave()
    assert cache.free_pages == 6


def test_a_fault_of_a_later_stretch_is_found_in_its_step(make: Callable[..., Bench]) -> None:
    wrong = Candidate(name="wrong", backend=IgnoresPrefix)
    cells = cells_of(make(traffic(6, prefixed=4), Eager, Breakable), wrong)
    assert {cell.status for cell in cells.values()} == {Status.FAILED}
    assert all("step 4" in cell.reason for cell in cells.values())
    assert all(cell.latency is None for cell in cells.values())


def test_a_mode_that_refuses_a_later_stretch_leaves_the_others_their_times(
    make: Callable[..., Bench],
) -> None:
    cells = cells_of(make(traffic(6, prefixed=4), Eager, RefusesPrefixes))
    assert {mode: cell.status for mode, cell in cells.items()} == {
        "eager": Status.MEASURED,
        "refuses_prefixes": Status.UNAVAILABLE,
    }


def test_progress_is_told_of_every_stretch(make: Callable[..., Bench]) -> None:
    told = Told()
    cells_of(make(traffic(6), Eager, told=told))
    assert list(told.totals)[-1] == "mask"
    assert told.totals["mask"] == 6
    assert told.done == 6


class FakeProfiler:
    """Remember what was profiled; stands in for the profiler, which needs a GPU."""

    passes: ClassVar[list[Pass]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def run(self, key: Pass, mode: ExecutionMode, scenes: list[Scene]) -> None:
        self.passes.append(key)

    def activities(self) -> dict[Pass, Activity]:
        return {}


@pytest.mark.parametrize(
    ("count", "profiled", "notes"),
    [(1, 1, 0), (6, 0, 1)],
    ids=["one-stretch", "several-stretches"],
)
def test_only_a_workload_of_one_stretch_is_profiled_and_that_is_said(
    make: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    profiled: int,
    notes: int,
) -> None:
    monkeypatch.setattr(FakeProfiler, "passes", [])
    monkeypatch.setattr(device_times, "Profiler", FakeProfiler)
    bench = make(traffic(count), Eager)
    cells = list(bench.cells([MASK]))
    assert profile_cells(bench, [MASK], cells) == (cells, [])
    assert len(FakeProfiler.passes) == profiled
    assert len(bench.notes.get("traffic", [])) == notes
