"""Which cells get times, which do not, and what a whole run collects."""

from collections.abc import Callable
from typing import Any

import pytest

from bcg_harness.bench.bench import Bench
from bcg_harness.bench.bucket_costs import measure_buckets
from bcg_harness.bench.cell import NO_BACKEND, Cell, Status
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.runner_modes import (
    Breakable,
    BreakableUnfused,
    Eager,
    EagerFused,
    Full,
    PaddedEager,
)
from bcg_harness.bench.spread import Verdict
from bcg_harness.bench.timing import Effort
from bcg_harness.candidates import Candidate
from bcg_harness.errors import HarnessError
from bcg_harness.testing import IgnoresPrefix, MaskBackend, NotInstalled, Raises, SlowBackend
from bcg_harness.testing.faulty_modes import (
    EndsTheProcess,
    RaisesInPrefill,
    RaisesWhenTimed,
    RefusesPrefixes,
    ScalesLogits,
    ShiftsHidden,
    SpoilsCache,
    TurnsWrong,
)

MakeBench = Callable[..., Bench]
MASK = Candidate(name="mask", backend=MaskBackend)
ALL: list[type[ExecutionMode]] = [Eager, PaddedEager, Breakable, Full]


def cells_of(bench: Bench, *candidates: Candidate) -> dict[str, Cell]:
    return {cell.mode: cell for cell in bench.cells(candidates or [MASK])}


@pytest.fixture(scope="module")
def slow_wait() -> float:
    return 0.01


def test_every_mode_is_measured_after_a_passing_check(make_bench: MakeBench) -> None:
    cells = cells_of(make_bench(ALL, "single-50"))
    assert {cell.status for cell in cells.values()} == {Status.MEASURED}
    assert list(cells) == ["eager", "padded_eager", "breakable", "full"]
    for cell in cells.values():
        assert cell.check is not None
        assert cell.check.error <= cell.check.budget


@pytest.mark.parametrize(
    "workload", ["single-16", "concurrent-3x5", "turns-2x128", "chunked-60x20", "single-100"]
)
def test_all_modes_serve_all_kinds_of_workloads(make_bench: MakeBench, workload: str) -> None:
    cells = cells_of(make_bench(ALL, workload))
    assert {cell.status for cell in cells.values()} == {Status.MEASURED}


@pytest.mark.parametrize("faulty", [ScalesLogits, ShiftsHidden])
def test_a_wrong_result_gets_no_time(make_bench: MakeBench, faulty: type[ExecutionMode]) -> None:
    cell = cells_of(make_bench([Eager, faulty], "single-50"))[faulty.name]
    assert cell.status is Status.FAILED
    assert "exceeds its budget" in cell.reason
    assert (cell.latency, cell.ttft, cell.enqueue, cell.speedup) == (None,) * 4


def test_a_mode_that_spoils_the_cache_is_found_in_a_later_chunk(make_bench: MakeBench) -> None:
    cells = cells_of(make_bench([Eager, SpoilsCache], "chunked-60x20"))
    assert cells["spoils_cache"].status is Status.FAILED
    assert "step 2" in cells["spoils_cache"].reason


def test_a_backend_that_is_wrong_gets_no_time_in_any_mode(make_bench: MakeBench) -> None:
    wrong = Candidate(name="wrong", backend=IgnoresPrefix)
    cells = cells_of(make_bench(ALL, "turns-2x128"), wrong)
    assert {cell.status for cell in cells.values()} == {Status.FAILED}


@pytest.mark.parametrize("faulty", [RaisesInPrefill, RaisesWhenTimed])
def test_a_mode_that_raises_leaves_the_others_their_times(
    make_bench: MakeBench, faulty: type[ExecutionMode]
) -> None:
    cells = cells_of(make_bench([Eager, faulty, Breakable]))
    assert cells[faulty.name].status is Status.ERROR
    assert "out of luck" in cells[faulty.name].reason
    for name in ("eager", "breakable"):
        latency = cells[name].latency
        assert latency is not None
        assert latency.samples == 3


def test_a_backend_that_raises_leaves_other_backends_their_times(make_bench: MakeBench) -> None:
    broken = Candidate(name="broken", backend=Raises)
    cells = list(make_bench([Eager], "concurrent-2x8").cells([broken, MASK]))
    assert [(cell.backend, cell.status) for cell in cells] == [
        ("broken", Status.ERROR),
        ("mask", Status.MEASURED),
    ]


def test_a_refused_batch_is_unavailable_with_its_reason(make_bench: MakeBench) -> None:
    cell = cells_of(make_bench([Eager, RefusesPrefixes], "turns-2x128"))["refuses_prefixes"]
    assert (cell.status, cell.reason) == (Status.UNAVAILABLE, "no cached prefixes")


def test_full_is_unavailable_for_a_backend_that_does_not_declare_it(make_bench: MakeBench) -> None:
    class NotDeclared(MaskBackend):
        def refuse_full_graph(self) -> str | None:
            return "supports_full_graph: not here"

    cell = cells_of(make_bench(ALL), Candidate(name="x", backend=NotDeclared))["full"]
    assert (cell.status, cell.reason) == (Status.UNAVAILABLE, "supports_full_graph: not here")


def test_a_backend_that_is_missing_is_skipped_with_its_hint(make_bench: MakeBench) -> None:
    bench = make_bench([Eager])
    assert list(bench.cells([Candidate(name="absent", backend=NotInstalled)])) == []
    assert "pip install" in bench.skipped["absent"]


def test_padding_counts_the_rows_of_the_bucket(make_bench: MakeBench) -> None:
    cells = cells_of(make_bench(ALL, "single-48"))
    assert cells["eager"].padding == 0
    assert cells["breakable"].padding == cells["padded_eager"].padding == 0.25
    assert cells["breakable"].served == {"bucket 64": 1}


def test_a_batch_beyond_the_largest_bucket_says_that_it_ran_eagerly(make_bench: MakeBench) -> None:
    cell = cells_of(make_bench(ALL, "single-100"))["breakable"]
    assert cell.served == {"more tokens than the largest bucket (64)": 1}
    assert cell.padding == 0


def test_steps_add_up_to_the_latency_of_the_workload(make_bench: MakeBench) -> None:
    cell = cells_of(make_bench([Eager], "chunked-60x20"))["eager"]
    assert len(cell.step_latency) == 3
    assert cell.latency is not None
    assert sum(cell.step_latency) == pytest.approx(cell.latency.median, rel=0.5)


def test_first_tokens_come_after_the_prefill_and_what_is_around_it(make_bench: MakeBench) -> None:
    cell = cells_of(make_bench([Eager], "concurrent-4x16"))["eager"]
    assert cell.latency is not None
    assert cell.ttft is not None
    assert cell.ttft.samples == 4 * cell.latency.samples
    assert cell.ttft.median > cell.latency.median


def test_captures_are_recorded_once_for_all_backends(make_bench: MakeBench) -> None:
    bench = make_bench([Eager, Breakable])
    list(bench.cells([MASK, Candidate(name="again", backend=MaskBackend)]))
    assert [(setup.backend, setup.mode) for setup in bench.setups] == [(NO_BACKEND, "breakable")]
    assert [bucket.bucket for bucket in bench.setups[0].buckets] == [64, 16]


def test_full_graphs_are_captured_for_each_backend(make_bench: MakeBench) -> None:
    bench = make_bench([Full])
    list(bench.cells([MASK, Candidate(name="again", backend=MaskBackend)]))
    assert [setup.backend for setup in bench.setups] == ["mask", "again"]


def test_lost_host_time_shows_in_the_modes_that_call_the_backend_and_only_there(
    make_bench: MakeBench, slow_wait: float
) -> None:
    class Slow(SlowBackend):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(MaskBackend(*arguments), slow_wait)

        name = "slow"
        capabilities = MaskBackend.capabilities

    bench = make_bench(ALL, "single-16", effort=Effort(seconds=0.0, least=5, most=5))
    cells = list(bench.cells([MASK, Candidate(name="slow", backend=Slow)]))
    fast, slow = ({c.mode: c for c in cells if c.backend == name} for name in ("mask", "slow"))
    added = {}
    for mode, cell in slow.items():
        before = fast[mode].enqueue
        assert cell.enqueue is not None
        assert before is not None
        added[mode] = cell.enqueue.median - before.median
    assert min(added[mode] for mode in ("eager", "padded_eager", "breakable")) > 1.5 * slow_wait
    # A full graph does not call the backend's Python again.
    assert added["full"] < slow_wait


def test_speed_is_compared_with_eager_of_the_same_backend(make_bench: MakeBench) -> None:
    cells = cells_of(make_bench([Eager, Breakable]))
    assert cells["eager"].speedup is None
    speedup, eager, mine = cells["breakable"].speedup, cells["eager"], cells["breakable"]
    assert speedup is not None
    assert eager.latency is not None
    assert mine.latency is not None
    assert speedup.ratio == pytest.approx(eager.latency.median / mine.latency.median)
    assert speedup.verdict in Verdict


def test_bucket_costs_cover_every_bucket(make_bench: MakeBench) -> None:
    bench = make_bench([Eager, Breakable])
    list(bench.cells([MASK]))
    costs = list(measure_buckets(bench, [MASK]))
    assert [(cost.bucket, cost.backend) for cost in costs] == [(16, "mask"), (64, "mask")]
    assert all(cost.capture_seconds > 0 for cost in costs)


def test_a_workload_that_is_longer_than_the_context_is_refused(make_bench: MakeBench) -> None:
    with pytest.raises(HarnessError, match="single-513"):
        make_bench([Eager], "single-513")


def test_what_turns_wrong_while_it_is_timed_gets_no_time(make_bench: MakeBench) -> None:
    cell = cells_of(make_bench([Eager, TurnsWrong], "single-50"))["turns_wrong"]
    assert cell.status is Status.FAILED
    assert cell.reason.startswith("after its timed rounds: ")
    assert cell.latency is None


def test_a_mode_that_would_end_the_process_is_an_error_of_its_own(make_bench: MakeBench) -> None:
    cells = cells_of(make_bench([Eager, EndsTheProcess]))
    assert cells["ends_the_process"].status is Status.ERROR
    assert cells["eager"].status is Status.MEASURED


@pytest.mark.parametrize("mode", [EagerFused, BreakableUnfused])
def test_what_differs_in_fusion_alone_is_not_available_on_a_cpu(
    make_bench: MakeBench, mode: type[ExecutionMode]
) -> None:
    cell = cells_of(make_bench([Eager, mode]))[mode.name]
    assert cell.status is Status.UNAVAILABLE
    assert "CUDA" in cell.reason


def test_fallbacks_are_batches_that_no_graph_served(make_bench: MakeBench) -> None:
    cells = cells_of(make_bench(ALL, "single-100"))
    reason = "more tokens than the largest bucket (64)"
    assert cells["breakable"].fallbacks == cells["full"].fallbacks == {reason: 1}
    assert cells["eager"].fallbacks == cells["padded_eager"].fallbacks == {}
