"""What each bucket costs, as ``bcg tune`` needs it."""

from collections.abc import Iterator, Sequence

from bcg_harness.bench.bench import Bench, Group
from bcg_harness.bench.cell import Cell
from bcg_harness.bench.costs import BucketCost
from bcg_harness.bench.families import parse_workload
from bcg_harness.bench.runner_modes import Breakable, Eager
from bcg_harness.bench.setup import BucketRecord
from bcg_harness.candidates import Candidate


def measure_buckets(bench: Bench, candidates: Sequence[Candidate]) -> Iterator[BucketCost]:
    """Measure each bucket, filled by one request, as ``breakable`` and as ``eager``, with every backend."""
    modes = [Eager(bench.ground), Breakable(bench.ground)]
    limit = bench.ground.runner.limits.max_context
    sizes = [size for size in bench.ground.buckets if size <= limit]
    for candidate in candidates:
        backend = bench.make(candidate)
        if backend is None:
            continue
        group = Group(label=candidate.label, backend=backend, modes=modes)
        prepared = bench.prepare(group)
        bench.progress.start(f"{candidate.label}: cost of each bucket", len(sizes))
        for size in sizes:
            eager, replay = bench.measure(group, prepared, parse_workload(f"single-{size}"))
            if cost := _cost(bench, size, eager, replay):
                yield cost


def _cost(bench: Bench, size: int, eager: Cell, replay: Cell) -> BucketCost | None:
    captured = _captured(bench).get(size)
    if eager.latency is None or replay.latency is None or captured is None:
        return None
    return BucketCost(
        bucket=size,
        backend=replay.backend,
        replay=replay.latency,
        eager=eager.latency,
        capture_seconds=captured.seconds,
        memory_bytes=captured.memory_bytes,
    )


def _captured(bench: Bench) -> dict[int, BucketRecord]:
    setups = (setup for setup in bench.setups if setup.mode == Breakable.name)
    return {record.bucket: record for setup in setups for record in setup.buckets}
