"""What an empty break costs; on a CPU the numbers mean nothing, but they are there."""

from collections.abc import Callable

from bcg_harness.bench.bench import Bench
from bcg_harness.bench.overhead import measure_break_overhead
from bcg_harness.bench.runner_modes import Breakable, Eager
from bcg_harness.candidates import Candidate
from bcg_harness.testing import MaskBackend

MakeBench = Callable[..., Bench]
MASK = Candidate(name="mask", backend=MaskBackend)


def test_without_a_capture_there_is_nothing_to_measure(make_bench: MakeBench) -> None:
    assert measure_break_overhead(make_bench([Eager]).ground) is None


def test_a_break_is_measured_in_the_bucket_that_is_large_enough(make_bench: MakeBench) -> None:
    bench = make_bench([Eager, Breakable])
    list(bench.cells([MASK]))
    bench.arena.leave()
    found = measure_break_overhead(bench.ground)
    assert found is not None
    assert (found.bucket, found.breaks) == (64, 2)
    assert found.host_per_break > 0


def test_the_cache_and_the_graphs_are_left_as_they_were(make_bench: MakeBench) -> None:
    bench = make_bench([Eager, Breakable])
    list(bench.cells([MASK]))
    bench.arena.leave()
    free, graphs = bench.ground.kv_cache.free_pages, dict(bench.ground.runner.graphs)
    measure_break_overhead(bench.ground)
    assert bench.ground.kv_cache.free_pages == free
    assert bench.ground.runner.graphs == graphs
