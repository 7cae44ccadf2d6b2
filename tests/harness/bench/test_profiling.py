"""What is read off the profiler's events."""

from dataclasses import dataclass

import pytest
from torch._C._autograd import DeviceType

from bcg_harness.bench.profiling import sort_events, union_length


@dataclass(frozen=True)
class Event:
    """Look like an event of kineto; times in milliseconds after the first prefill began."""

    label: str
    begin: float
    length: float
    device: bool = False

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return int((1e3 + self.begin / 1e3) * 1e9)

    def duration_ns(self) -> int:
        return int(self.length * 1e6)

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.device else DeviceType.CPU


EAGER, BREAKABLE = ("b", "eager", "w"), ("b", "breakable", "w")
PASSES = {EAGER: [(1000.0, 1000.010)], BREAKABLE: [(1000.020, 1000.030)]}
EVENTS = [
    Event("cudaLaunchKernel", 1, 0.5),
    Event("cudaDeviceSynchronize", 2, 5),
    Event("cuLaunchKernelEx", 2, 0.5),
    Event("aten::mm", 1, 1),
    Event("gemm", 2, 2, device=True),
    Event("gemm", 3, 2, device=True),
    Event("cudaMemcpyAsync", 20.5, 0.5),
    Event("cudaGraphLaunch", 22, 1),
    Event("cudaLaunchKernel", 23.5, 0.1),
    Event("cudaGraphLaunch", 24, 1),
    Event("cudaMemcpyAsync", 27, 0.5),
    Event("Memcpy HtoD", 21, 0.5, device=True),
    Event("gemm", 23, 1, device=True),
    Event("flash", 24.5, 1, device=True),
]


def test_each_pass_has_its_own_kernels() -> None:
    found = sort_events(EVENTS, PASSES)
    assert [name for name, _, _ in found[EAGER].device] == ["gemm", "gemm"]
    assert [name for name, _, _ in found[BREAKABLE].device] == ["Memcpy HtoD", "gemm", "flash"]


def test_launches_are_calls_that_queue_work() -> None:
    found = sort_events(EVENTS, PASSES)
    assert len(found[EAGER].launches) == 2
    assert len(found[BREAKABLE].launches) == 5


def test_what_happens_between_the_prefills_of_a_pass_is_left_out() -> None:
    passes = {EAGER: [(1000.0, 1000.0024), (1000.0226, 1000.0236)]}
    found = sort_events(EVENTS, passes)[EAGER]
    assert [name for name, _, _ in found.device] == ["gemm", "gemm"]
    assert [round((start - 1000) * 1e3) for _, start, _ in found.device] == [2, 23]
    assert found.busy == pytest.approx(3e-3, rel=1e-3)


def test_overlapping_kernels_count_once() -> None:
    assert sort_events(EVENTS, PASSES)[EAGER].busy == pytest.approx(3e-3, rel=1e-3)


def test_a_pass_without_events_is_idle() -> None:
    assert sort_events([], PASSES)[EAGER].busy == 0


def test_graph_launches_are_segments_and_breaks_lie_between_them() -> None:
    spans = sort_events(EVENTS, PASSES)[BREAKABLE].spans()
    host = {span.name: span for span in spans if span.lane == "host"}
    assert list(host) == ["load", "segment 0", "break 0", "segment 1", "head"]
    assert host["break 0"].start == pytest.approx(3e-3, rel=1e-3)
    assert host["break 0"].seconds == pytest.approx(1e-3, rel=1e-3)
    assert host["head"].seconds == pytest.approx(2.5e-3, rel=1e-3)


def test_kernels_are_on_the_device_lane_from_the_beginning_of_the_prefill() -> None:
    spans = sort_events(EVENTS, PASSES)[BREAKABLE].spans()
    device = [span for span in spans if span.lane == "device"]
    assert [span.name for span in device] == ["Memcpy HtoD", "gemm", "flash"]
    assert device[0].start == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(1, 2)], 1),
        ([(1, 2), (3, 5)], 3),
        ([(3, 5), (1, 4)], 4),
        ([(1, 9), (2, 3)], 8),
        ([(1, 2), (2, 3)], 2),
    ],
    ids=["none", "one", "apart", "overlapping", "inside", "touching"],
)
def test_the_union_counts_every_moment_once(
    intervals: list[tuple[float, float]], length: float
) -> None:
    assert union_length(intervals) == length
