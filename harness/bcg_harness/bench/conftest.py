"""Fixtures and hooks of the pytest-benchmark suite; loaded with it, and with nothing else."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bcg_core import BcgError, negotiate_page_size
from bcg_harness.bench.bench import Bench, Group
from bcg_harness.bench.cell import Status
from bcg_harness.bench.defaults import default_ladder, default_workloads, fitting
from bcg_harness.bench.families import parse_workload
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.modes import select_modes
from bcg_harness.bench.workloads import Workload
from bcg_harness.candidates import Candidate
from bcg_harness.environment import Environment
from bcg_harness.models import resolve_model
from bcg_harness.plugin_options import backends_of, device_of, dtype_of
from bcg_harness.pytest_plugin import usage_errors
from bcg_harness.tokens import RandomTokens

_NO_BENCHMARK = "this suite needs pytest-benchmark: pip install 'breakable-cuda-graph[test]', and no -p no:benchmark"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold what is measured.

    Attributes:
        device: to measure on.
        modes: in the order of tables.
        workloads: by name.
        chosen: whether the workloads were asked for by name.
    """

    device: torch.device
    modes: list[type[ExecutionMode]]
    workloads: dict[str, Workload]
    chosen: bool

    @classmethod
    def of(cls, config: pytest.Config) -> "Plan":
        """Read the options; raises a BcgError for what they ask wrongly."""
        device = device_of(config)
        names, seed = config.getoption("--bcg-workload"), config.getoption("--bcg-seed")
        return cls(
            device=device,
            modes=select_modes(config.getoption("--bcg-mode"), device),
            workloads={
                name: parse_workload(name, seed=seed) for name in names or default_workloads(device)
            },
            chosen=bool(names),
        )

    def bench(self, config: pytest.Config) -> Bench:
        """Make the model and the bench; raises a BcgError for a model that cannot be, or has too short a context."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # the clock waits for the current device
        seed, candidates = config.getoption("--bcg-seed"), backends_of(config)[0]
        name, dtype = config.getoption("--bcg-model"), dtype_of(config)
        model = resolve_model(name, dtype=dtype, device=self.device, seed=seed).model
        context = model.spec.max_positions
        workloads, _ = fitting(list(self.workloads.values()), context, chosen=self.chosen)
        return Bench(
            model,
            workloads,
            self.modes,
            RandomTokens(model.spec.vocab_size, seed=seed),
            buckets=default_ladder(model.spec.device, context),
            page_size=negotiate_page_size(c.selected.capabilities for c in candidates),
        )


_PLAN = pytest.StashKey[Plan]()
_BENCH = pytest.StashKey[Bench]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the benchmark for every selected mode and workload; the plug-in adds the backends."""
    config = metafunc.config
    if "bench_mode" in metafunc.fixturenames:
        if not config.pluginmanager.hasplugin("benchmark"):
            pytest.fail(_NO_BENCHMARK, pytrace=False)
        with usage_errors():
            plan = config.stash[_PLAN] = Plan.of(config)
        metafunc.parametrize("bench_mode", [mode.name for mode in plan.modes], scope="session")
        metafunc.parametrize("bench_workload", list(plan.workloads))


def pytest_runtestloop(session: pytest.Session) -> None:
    """Make model and bench before the first test, so that what is wrong with them is told once."""
    config = session.config
    if session.items and _PLAN in config.stash and not config.option.collectonly:
        try:
            config.stash[_BENCH] = config.stash[_PLAN].bench(config)
        except BcgError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was measured; a header would not be shown, as this file is found too late for one."""
    if _BENCH in config.stash:
        environment = Environment.of(config.stash[_PLAN].device)
        warning = ": these times say nothing of a GPU" if environment.device == "cpu" else ""
        terminalreporter.write_line(f"bcg bench: {environment}{warning}")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Add GPU, driver and versions of libraries to what pytest-benchmark writes."""
    if _PLAN in config.stash:
        machine_info["bcg"] = Environment.of(config.stash[_PLAN].device).to_json()


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Bench:
    """Return the bench of all selected modes and workloads; of the default ones, those within the model's context."""
    return request.config.stash[_BENCH]


@pytest.fixture(scope="session")
def bench_ready(bench: Bench, bcg_backend: Candidate, bench_mode: str) -> ExecutionMode:
    """Return the mode of this test, ready for its backend; skips with the reason where there is none."""
    mode = next(mode for mode in bench.modes if mode.name == bench_mode)
    backend = bench.make(bcg_backend)
    if backend is None:
        if reason := bench.broken.get(bcg_backend.label):
            pytest.fail(reason, pytrace=False)
        pytest.skip(bench.skipped[bcg_backend.label])
    prepared = bench.prepare(Group(label=bcg_backend.label, backend=backend, modes=[mode]))
    for status, reason in prepared.others.values():
        if status is Status.UNAVAILABLE:
            pytest.skip(reason)
        pytest.fail(reason, pytrace=False)
    return mode
