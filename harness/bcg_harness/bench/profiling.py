"""What the device does during a prefill, by torch's profiler; apart from timed rounds, which it would disturb."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import sleep, time_ns
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bcg_harness.bench.arena import Scene
from bcg_harness.bench.cell import DeviceTime
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.spread import Spread
from bcg_harness.bench.timeline import Span
from bcg_harness.bench.timing import synchronise

_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync", "LaunchCooperativeKernel")
"""Parts of the names of host calls that put work on the device."""
Bar = tuple[str, float, float]
"""Name, start and end, in seconds."""
Pass = tuple[str, ...]
"""Names a pass: backend, mode and workload."""
Interval = tuple[float, float]
"""Begin and end of a prefill, in Unix seconds."""
_APART = 1e-3
"""Seconds before and after each prefill, so that inexact clocks cannot mix up what belongs to it and what does not."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Hold what happened in the prefills of one pass of a mode.

    Attributes:
        device: kernels and copies, by start.
        launches: host calls that put work on the device, by start.
        start: when the first prefill began.
    """

    device: tuple[Bar, ...]
    launches: tuple[Bar, ...]
    start: float

    @property
    def busy(self) -> float:
        """Return the time in which at least one kernel or copy ran."""
        return union_length((start, end) for _, start, end in self.device)

    def device_time(self, latency: Spread) -> DeviceTime:
        """Summarise, beside the ``latency`` of timed rounds."""
        return DeviceTime(
            busy=self.busy,
            gap=latency.median - self.busy,
            launches=len(self.launches),
            kernels=len(self.device),
        )

    def spans(self) -> tuple[Span, ...]:
        """Return the bars of a time line; on the host, a graph launch is a segment, and what is between two a break."""
        graphs = [(s, e) for name, s, e in self.launches if "GraphLaunch" in name]
        host = [self._span("host", f"segment {n}", s, e) for n, (s, e) in enumerate(graphs)]
        host += [
            self._span("host", f"break {n}", before[1], after[0])
            for n, (before, after) in enumerate(pairwise(graphs))
        ]
        if graphs:
            host.append(self._span("host", "load", self.start, graphs[0][0]))
            host.append(self._span("host", "head", graphs[-1][1], self.launches[-1][2]))
        device = [self._span("device", name, s, e) for name, s, e in self.device]
        return tuple(sorted([*host, *device], key=lambda span: span.start))

    def _span(self, lane: str, name: str, start: float, end: float) -> Span:
        return Span(lane=lane, name=name, start=start - self.start, seconds=max(0.0, end - start))


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``intervals`` (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


class Profiler:
    """Profile passes of modes, one after the other; needs a GPU.

    Only CUDA activity is recorded: recording the host's operators too would slow the host down, and with it all gaps.
    From its first use on, a profiler slows every launch of the process, so that nothing can be timed afterwards.
    """

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._passes: dict[Pass, list[Interval]] = {}

    def __enter__(self) -> "Profiler":
        """Begin to record."""
        self._profiler.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """End recording."""
        self._profiler.__exit__(*exception)

    def run(self, key: Pass, mode: ExecutionMode, scenes: Sequence[Scene]) -> None:
        """Run one pass of ``mode``, to be called ``key``; what counts is what its latency counts: prefills alone."""
        device = mode.ground.device
        prefills = self._passes.setdefault(key, [])
        for scene in scenes:
            if scene.timed:
                batch = scene.batch()
                mode.stage(batch)
                synchronise(device)
                sleep(_APART)
                begun = time_ns()
                mode.prefill(batch)
                synchronise(device)
                prefills.append((begun / 1e9, time_ns() / 1e9))
                sleep(_APART)

    def activities(self) -> dict[Pass, Activity]:
        """Return what happened in each pass, once recording has ended."""
        kineto: Any = self._profiler.profiler
        return sort_events(kineto.kineto_results.events(), self._passes)


def sort_events(
    events: Iterable[Any], passes: Mapping[Pass, Sequence[Interval]]
) -> dict[Pass, Activity]:
    """Assign kineto ``events`` to the pass in one of whose prefills they happened."""
    device: list[Bar] = []
    launches: list[Bar] = []
    for event in events:
        name, start = event.name(), event.start_ns() / 1e9
        bar = name, start, start + event.duration_ns() / 1e9
        if event.device_type() == DeviceType.CUDA:
            device.append(bar)
        elif name.startswith("cu") and any(part in name for part in _LAUNCHES):
            launches.append(bar)
    device.sort(key=_start)
    launches.sort(key=_start)
    return {
        key: Activity(
            device=_within(device, prefills),
            launches=_within(launches, prefills),
            start=prefills[0][0],
        )
        for key, prefills in passes.items()
    }


def _start(bar: Bar) -> float:
    return bar[1]


def _within(bars: list[Bar], intervals: Iterable[Interval]) -> tuple[Bar, ...]:
    """Return those of the sorted ``bars`` that start in one of ``intervals``, which are sorted too."""
    found: list[Bar] = []
    for begin, end in intervals:
        first = bisect_left(bars, begin - _APART / 2, key=_start)
        found += bars[first : bisect_right(bars, end + _APART / 2, key=_start)]
    return tuple(found)
