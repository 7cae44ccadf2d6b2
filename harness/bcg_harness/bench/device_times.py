"""What the device does in every measured cell; the last thing a run does, as a profiler slows all later launches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bcg_harness.bench.bench import Bench, Group
from bcg_harness.bench.cell import Cell, Status
from bcg_harness.bench.profiling import Activity, Pass, Profiler
from bcg_harness.bench.runner_modes import Breakable
from bcg_harness.bench.timeline import Timeline
from bcg_harness.bench.timing import run_once
from bcg_harness.candidates import Candidate

_NAME = 100
"""Characters that are kept of a kernel's name."""


def profile_cells(
    bench: Bench, candidates: Sequence[Candidate], cells: Sequence[Cell]
) -> tuple[list[Cell], list[Timeline]]:
    """Return ``cells`` with their device times, and a time line of ``breakable`` for each backend. Needs a GPU."""
    measured = {_key(cell) for cell in cells if cell.status is Status.MEASURED}
    activities: dict[Pass, Activity] = {}
    timelines = []
    for group in bench.groups(candidates):
        seen = _profile(bench, group, measured)
        timelines += _timeline(bench, group, seen)
        activities |= seen
    return [_with_device(cell, activities) for cell in cells], timelines


def _key(cell: Cell) -> Pass:
    return cell.backend, cell.mode, cell.workload


def _with_device(cell: Cell, activities: Mapping[Pass, Activity]) -> Cell:
    activity = activities.get(_key(cell))
    if activity is None or cell.latency is None:
        return cell
    return replace(cell, device=activity.device_time(cell.latency))


def _profile(bench: Bench, group: Group, measured: set[Pass]) -> dict[Pass, Activity]:
    prepared = bench.prepare(group)
    bench.progress.start(f"{group.label}: profiling", len(bench.workloads))
    with Profiler() as profiler:
        for workload in bench.workloads:
            bench.progress.advance()
            if len(workload.stretches) > 1:
                bench.note(
                    workload.name, ["not profiled: it has more batches than a profile holds"]
                )
                continue
            (scenes,) = bench.arena.enter(workload)
            bench.compute_reference().run(scenes)
            for mode in prepared.ready:
                key = group.label, mode.name, workload.name
                if key in measured:
                    run_once(mode, scenes)  # what was prepared anew has its first calls here
                    profiler.run(key, mode, scenes)
    return profiler.activities()


def _timeline(bench: Bench, group: Group, activities: Mapping[Pass, Activity]) -> list[Timeline]:
    """Return the time line of the first workload that is one replay; none where there is none."""
    for workload in bench.workloads:
        activity = activities.get((group.label, Breakable.name, workload.name))
        spans = () if activity is None else activity.spans()
        if len(workload.timed_steps) == 1 and any(span.name == "break 0" for span in spans):
            short = tuple(replace(span, name=span.name[:_NAME]) for span in spans)
            return [
                Timeline(
                    backend=group.label, mode=Breakable.name, workload=workload.name, spans=short
                )
            ]
    return []
