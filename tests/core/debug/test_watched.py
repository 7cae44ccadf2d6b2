"""Watching changes nothing but what is refused, and costs nothing where it is off."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import bcg_core.debug
from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CPUSegmentEngine,
    DebugError,
    Mode,
    PrefillRunner,
    eager_on_graph,
)
from bcg_core.debug import CaptureRecord, Site, Tool, WatchedEngine, all_tools
from bcg_core.debug.names import tensors_below
from bcg_core.debug.observer import Observer
from bcg_harness.testing import RerunningEngine

Make = Callable[..., Any]
HOME = str(Path(bcg_core.debug.__file__).parent)


def calls_into_debug(run: Callable[[], Any]) -> list[str]:
    """Return the functions of ``bcg_core.debug`` that ``run`` calls."""
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return called


def test_a_plain_runner_calls_nothing_of_the_tools(make_runner: Make, make_batch: Make) -> None:
    def work() -> None:
        make_runner().prefill(make_batch(3, 4))

    assert calls_into_debug(work) == []


def test_a_watched_runner_is_seen_to_call_them(make_watched: Make, make_batch: Make) -> None:
    runner, batch = make_watched(), make_batch(3, 4)
    assert "PointerGuard._attributes" in calls_into_debug(lambda: runner.prefill(batch))


def test_importing_the_core_does_not_import_the_tools(tmp_path: Path) -> None:
    code = (
        "import pkgutil, sys, bcg_core\n"
        "for module in pkgutil.iter_modules(bcg_core.__path__, 'bcg_core.'):\n"
        "    if module.name != 'bcg_core.debug': __import__(module.name)\n"
        "print([name for name in sys.modules if name.startswith('bcg_core.debug')])"
    )
    # Elsewhere, as `-c` puts the working directory on the path.
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


def test_a_plain_engine_gives_breaks_back_as_they_are(engine: CPUSegmentEngine) -> None:
    def call() -> None:
        pass

    assert engine.around_break(0, "name", call) is call


# The same results


@pytest.mark.parametrize("lengths", [(5,), (2, 3), (8,), (9, 4), (17,), ()], ids=str)
def test_watched_results_have_the_bits_of_plain_ones(
    make_watched: Make,
    make_runner: Make,
    make_batch: Make,
    assert_same_bits: Make,
    lengths: tuple[int, ...],
) -> None:
    plain = make_runner().prefill(make_batch(*lengths))
    watched = make_watched().prefill(make_batch(*lengths))
    assert watched.admission == plain.admission
    assert_same_bits(watched.hidden_RD, plain.hidden_RD)
    assert_same_bits(watched.logits_BV, plain.logits_BV)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_a_watched_runner_serves_every_mode(
    make_watched: Make, make_batch: Make, mode: Mode
) -> None:
    make_watched().prefill(make_batch(3, 4), mode=mode)


def test_a_watched_capture_reports_what_a_plain_one_does(
    make_watched: Make, make_runner: Make
) -> None:
    def shape(runner: PrefillRunner) -> list[tuple[int, int, int, int]]:
        buckets = runner.capture().buckets
        return [(b.bucket, b.segments, b.breaks, b.memory_bytes) for b in buckets]

    assert shape(make_watched(captured=False)) == shape(make_runner(captured=False))


def test_an_engine_may_watch_any_other(make_batch: Make, watched_capture: Make) -> None:
    ran: list[int] = []
    graph = BreakableCUDAGraph(WatchedEngine(RerunningEngine(lambda: ran.append(1))))
    with BreakableCUDAGraphCapture(graph):
        result = torch.ones(2) + 1
    graph.replay()
    assert (ran, result.tolist()) == ([1], [2, 2])


def test_an_engine_has_every_tool_that_needs_no_runner_by_default(engine: CPUSegmentEngine) -> None:
    hidden: list[Tensor] = []
    leave = eager_on_graph(lambda: hidden.append(torch.ones(2)))
    graph = BreakableCUDAGraph(WatchedEngine(engine))

    def capture() -> None:
        with BreakableCUDAGraphCapture(graph):
            leave()
            hidden[0].add_(1)

    with pytest.raises(DebugError):
        capture()


def test_inlined_breaks_are_watched_as_part_of_their_segment(engine: CPUSegmentEngine) -> None:
    double = eager_on_graph(lambda x: x * 2)
    graph = BreakableCUDAGraph(WatchedEngine(engine))
    x = torch.ones(2)
    with BreakableCUDAGraphCapture(graph, inline_breaks=True):
        result = double(x) + 1
    graph.replay()
    assert result.tolist() == [3, 3]


@pytest.mark.parametrize("rows", [2, 3])
def test_compiled_functions_run_as_they_are_below_an_observer(rows: int) -> None:
    # As in a capture on CUDA, which fuses: compiled in a warm-up, then called below the mode.
    compiled = torch.compile(lambda x: x * 2 + 1, fullgraph=True, backend="eager")
    compiled(torch.ones(2, 4))
    record = CaptureRecord()
    with Observer(record, [], torch.device("cpu")):
        assert torch.equal(compiled(torch.ones(rows, 4)), torch.full((rows, 4), 3.0))


def test_an_engine_knows_the_memory_of_its_segments(engine: CPUSegmentEngine) -> None:
    x, graph = torch.ones(2), BreakableCUDAGraph(engine)
    with BreakableCUDAGraphCapture(graph):
        y = x + 1
    assert engine.holds([x.data_ptr(), y.data_ptr()]) == {y.data_ptr()}
    graph.reset()
    assert engine.holds([y.data_ptr()]) == set()


# Tools of one's own


class Diary(Tool):
    """Write down what a tool hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def touches(self, record: CaptureRecord, tensor: Tensor, where: str) -> None:
        self.heard.append(where)

    def captured(self, record: CaptureRecord) -> Callable[[], None]:
        self.heard.append("captured")
        return lambda: self.heard.append("checked")

    def around_break(
        self, device: torch.device, site: Site, call: Callable[[], Any]
    ) -> Callable[[], Any]:
        def watched() -> Any:
            self.heard.append(str(site))
            return call()

        return watched


def test_a_tool_hears_of_everything_in_order(watched_capture: Make) -> None:
    diary, x = Diary(), torch.ones(2)
    look = eager_on_graph(lambda x: None, name="look")

    def work() -> None:
        x.mul_(2)
        look(x)
        x.add_(1)

    graph, _ = watched_capture(work, tools=[diary])
    assert diary.heard == [
        "aten::mul_.Tensor in segment 0",
        "an argument of break 0 (look)",
        "break 0 (look)",
        "aten::add_.Tensor in segment 1",
        "captured",
    ]
    diary.heard.clear()
    graph.replay()
    assert diary.heard == ["checked", "break 0 (look)"]


def test_a_tool_that_does_nothing_is_a_tool(make_watched: Make, make_batch: Make) -> None:
    make_watched(tools=[Tool()]).prefill(make_batch(3))


@pytest.mark.parametrize("mark", [lambda fn: fn, eager_on_graph], ids=["segment", "break"])
def test_a_capture_that_fails_is_not_checked(
    watched_capture: Make, mark: Callable[..., Callable[[], int]]
) -> None:
    diary = Diary()
    with pytest.raises(ZeroDivisionError):
        watched_capture(mark(lambda: 1 // 0), tools=[diary])
    assert "captured" not in diary.heard


def test_there_is_one_of_each_tool() -> None:
    assert len({type(tool) for tool in all_tools()}) == len(all_tools()) == 6


# Names


class Slotted:
    __slots__ = ("empty", "table")

    def __init__(self) -> None:
        self.table = torch.ones(1)


def test_tensors_are_named_by_how_they_are_reached() -> None:
    module = torch.nn.BatchNorm1d(1)
    owner = SimpleNamespace(
        plain=torch.ones(1),
        nested=[(torch.ones(1), "text"), {"key": torch.ones(1), 3: None}],
        slotted=Slotted(),
        module=module,
        function=lambda: None,
    )
    assert [name for name, _ in tensors_below(owner, "it")] == [
        "it.plain",
        "it.nested[0][0]",
        "it.nested[1]['key']",
        "it.slotted.table",
        "it.module.weight",
        "it.module.bias",
        "it.module.running_mean",
        "it.module.running_var",
        "it.module.num_batches_tracked",
    ]
