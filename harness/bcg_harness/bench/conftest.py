"""Fixtures and hooks of the pytest-benchmark suite; loaded with it, and with nothing else."""

from typing import Any

import pytest
import torch

from bcg_core import BackendRegistry, BcgError, negotiate_page_size
from bcg_harness.bench.bench import Bench, Group
from bcg_harness.bench.defaults import default_ladder, default_workloads, fitting
from bcg_harness.bench.families import parse_workload
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.modes import select_modes
from bcg_harness.bench.record import Status
from bcg_harness.bench.workloads import Workload
from bcg_harness.candidates import Candidate, select_backends
from bcg_harness.environment import Environment
from bcg_harness.pytest_plugin import usage_errors
from bcg_harness.selection import parse_device
from bcg_harness.tokens import RandomTokens
from bcg_llama import LlamaModel

_NO_BENCHMARK = "this suite needs pytest-benchmark: pip install 'breakable-cuda-graph[test]', and no -p no:benchmark"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to begin without pytest-benchmark."""
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(_NO_BENCHMARK)


def _device(config: pytest.Config) -> torch.device:
    try:
        return parse_device(config.getoption("--bcg-device"))
    except BcgError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was measured; a header would not be shown, as this file is found too late for one."""
    environment = Environment.of(_device(config))
    warning = ": these times say nothing of a GPU" if environment.device == "cpu" else ""
    terminalreporter.write_line(f"bcg bench: {environment}{warning}")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Add GPU, driver and versions of libraries to what pytest-benchmark writes."""
    machine_info["bcg"] = Environment.of(_device(config)).to_json()


def _modes(config: pytest.Config) -> list[type[ExecutionMode]]:
    return select_modes(config.getoption("--bcg-mode"), _device(config))


def _workloads(config: pytest.Config) -> list[Workload]:
    names = config.getoption("--bcg-workload")
    return [parse_workload(name) for name in names or default_workloads(_device(config))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the benchmark for every selected mode and workload; the plug-in adds the backends."""
    if "bench_mode" in metafunc.fixturenames:
        with usage_errors():
            modes, workloads = _modes(metafunc.config), _workloads(metafunc.config)
        names = [mode.name for mode in modes]
        metafunc.parametrize("bench_mode", names, scope="session")
        metafunc.parametrize("bench_workload", workloads, ids=[w.name for w in workloads])


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, bcg_model: LlamaModel) -> Bench:
    """Return the bench of all selected modes and workloads; what is longer than the model's context is skipped."""
    config, spec = request.config, bcg_model.spec
    chosen = config.getoption("--bcg-backend")
    with usage_errors():
        registry = BackendRegistry()
        candidates, _ = select_backends(
            chosen or registry.names(), registry, device=spec.device, required=False
        )
        workloads, _ = fitting(_workloads(config), spec.max_positions, chosen=False)
        return Bench(
            bcg_model,
            workloads,
            _modes(config),
            RandomTokens(spec.vocab_size),
            buckets=default_ladder(spec.device, spec.max_positions),
            page_size=negotiate_page_size(c.selected.capabilities for c in candidates),
        )


@pytest.fixture(scope="session")
def bench_ready(bench: Bench, bcg_backend: Candidate, bench_mode: str) -> ExecutionMode:
    """Return the mode of this test, ready for its backend; skips with the reason where there is none."""
    mode = next(mode for mode in bench.modes if mode.name == bench_mode)
    backend = bench.make(bcg_backend)
    if backend is None:
        pytest.skip(bench.skipped[bcg_backend.label])
    prepared = bench.prepare(Group(label=bcg_backend.label, backend=backend, modes=[mode]))
    for status, reason in prepared.others.values():
        if status is Status.UNAVAILABLE:
            pytest.skip(reason)
        pytest.fail(reason, pytrace=False)
    return mode
