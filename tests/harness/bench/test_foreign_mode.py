"""Meta's package as capture mechanism, with a stand-in that captures with the CPU engine in the package's manner."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from bcg_core import CPUSegmentEngine
from bcg_harness.bench import foreign_mode
from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.foreign_mode import BreakableMeta
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.testing.mode_trial import ModeTrial
from bcg_llama import LlamaModel

PACKAGE = "breakable_cuda_graphs"
SEGMENT_BYTES = 100


class StandIn(ModuleType):
    """Offer what ``breakable_cuda_graphs`` 0.1.0 offers.

    Attributes:
        graphs: all that were made.
        calls: functions that ran as breaks at replay.
    """

    def __init__(self) -> None:
        super().__init__(PACKAGE)
        self.__spec__ = ModuleSpec(PACKAGE, None)
        self.engine = CPUSegmentEngine()
        self.graphs: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []
        self.capturing: Any = None
        package = self

        class BreakableCUDAGraph:
            def __init__(self, pool: Any = None) -> None:
                self.given_pool = pool
                self.steps: list[Callable[[], Any]] = []
                package.graphs.append(self)

            def pool(self) -> Any:
                return self.given_pool or ("pool of", id(self))

            def replay(self) -> None:
                for step in self.steps:
                    step()

        self.BreakableCUDAGraph = BreakableCUDAGraph

    @contextmanager
    def breakable_graph(self, graph: Any) -> Iterator[None]:
        assert self.capturing is None
        with self.engine.capturing():
            self.capturing = graph
            self.engine.begin()
            yield
            graph.steps.append(self.engine.end().replay)
        self.capturing = None

    def no_graph(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def wrapper(*args: Any) -> Any:
            if self.capturing is None:
                return fn(*args)
            self.capturing.steps.append(self.engine.end().replay)
            assert fn(*args) is None, "the package allows no tensors here"
            self.capturing.steps.append(partial(self._again, fn, args))
            self.engine.begin()
            return None

        return wrapper

    def _again(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.calls.append(args)
        fn(*args)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, PACKAGE, stand_in)
    monkeypatch.setattr(
        foreign_mode, "pool_bytes", lambda pool: SEGMENT_BYTES * len(stand_in.graphs)
    )
    return stand_in


@pytest.fixture
def trial(package: StandIn, two_layers: LlamaModel) -> ModeTrial:
    return ModeTrial(two_layers, BreakableMeta, padded=True)


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([[(0, 13)]], id="single"),
        pytest.param([[(0, 64)]], id="exactly-a-bucket"),
        pytest.param([[(0, 20), (1, 5), (2, 30)]], id="several"),
        pytest.param([[(0, 20), (1, 7)], [(0, 3), (1, 9), (2, 12)]], id="prefixes"),
        pytest.param([[(0, 30)], [(0, 30)], [(0, 5)]], id="chunked"),
        pytest.param([[(0, 50), (1, 50)]], id="above-the-largest"),
    ],
)
def test_results_are_bit_equal_to_padded_eager(
    steps: list[list[tuple[int, int]]], trial: ModeTrial
) -> None:
    step = [trial.step(*requests) for requests in steps][-1]
    assert step.result.hidden_RD is not None
    assert torch.equal(step.result.hidden_RD, step.hidden_RD)
    assert torch.equal(step.result.logits_BV, step.logits_BV)
    assert torch.equal(step.kv_written, step.kv_expected)


def test_attention_is_a_break_of_the_package_in_every_layer(
    trial: ModeTrial, package: StandIn
) -> None:
    trial.step((0, 13))
    assert [layer for _, layer in package.calls] == [0, 1]


def test_buckets_are_captured_the_largest_first(trial: ModeTrial) -> None:
    records = trial.setup.buckets
    assert [(record.bucket, record.segments, record.breaks) for record in records] == [
        (64, 3, 2),
        (16, 3, 2),
    ]


def test_all_graphs_share_one_pool(trial: ModeTrial, package: StandIn) -> None:
    first, second = package.graphs
    assert (first.given_pool, second.given_pool) == (None, first.pool())


def test_memory_is_that_of_the_pool(trial: ModeTrial) -> None:
    assert trial.setup.graph_memory == 2 * SEGMENT_BYTES
    assert [record.memory_bytes for record in trial.setup.buckets] == [SEGMENT_BYTES] * 2


def test_another_backend_needs_no_other_capture(trial: ModeTrial, package: StandIn) -> None:
    setup = trial.mode.prepare(trial.make_backend(), "another")
    assert setup == ModeSetup(backend=NO_BACKEND, mode=BreakableMeta.name)
    assert len(package.graphs) == 2


def test_sizes_limit_what_is_captured(package: StandIn, two_layers: LlamaModel) -> None:
    trial = ModeTrial(two_layers, lambda ground: BreakableMeta(ground, sizes=[64]))
    assert [record.bucket for record in trial.setup.buckets] == [64]


def test_a_cpu_cannot_run_it(package: StandIn) -> None:
    reason = BreakableMeta.unavailable(torch.device("cpu"))
    assert reason is not None
    assert "NVIDIA GPU" in reason


def test_a_missing_package_is_said_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    reason = BreakableMeta.unavailable(torch.device("cuda"))
    assert reason is not None
    assert "pip install breakable-cuda-graphs" in reason


def test_nothing_is_missing_on_a_gpu_with_the_package(package: StandIn) -> None:
    assert BreakableMeta.unavailable(torch.device("cuda")) is None
