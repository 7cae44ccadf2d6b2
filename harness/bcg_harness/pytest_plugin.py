"""Pytest options and fixtures for tests of attention backends.

Loaded in every project of its environment: all names carry a prefix, and nothing heavy is imported before a fixture is
used.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from bcg_harness.candidates import Candidate
    from bcg_harness.outcome import CheckResult
    from bcg_llama import LlamaModel

_BACKENDS = pytest.StashKey[dict[str, "Candidate | CheckResult"]]()
"""What was found of each backend, or why it cannot be used, by label."""

DISTRIBUTED = (
    "a suite of bcg_harness cannot be distributed by pytest-xdist, as its tests share a captured runner, a device "
    "and a report. Add -n 0, which also undoes a -n in addopts: the conformance kit takes seconds on the emulator"
)
"""Why ``pytest -n`` is refused, and what to do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; ``bcg check`` and ``bcg bench`` have the same without the prefix."""
    group = parser.getgroup("bcg", "breakable CUDA graphs")
    group.addoption(
        "--bcg-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="attention backend to test; repeatable; default: all registered ones, skipping what is not installed",
    )
    group.addoption(
        "--bcg-backend-class",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="attention backend to test that needs no registration; found in the current directory too; repeatable",
    )
    group.addoption(
        "--bcg-device", default="cpu", metavar="NAME", help="cpu (emulated graphs) or cuda"
    )
    group.addoption(
        "--bcg-require-cuda",
        action="store_true",
        help="test on a GPU, as with --bcg-device cuda, and fail where there is none",
    )
    group.addoption(
        "--bcg-dtype",
        default=None,
        metavar="NAME",
        help="float32, bfloat16 or float16; default: float32 on cpu, bfloat16 on cuda",
    )
    group.addoption(
        "--bcg-model",
        default="tiny",
        metavar="MODEL",
        help="built-in model, Hugging Face directory, .gguf file or hub id",
    )
    group.addoption(
        "--bcg-seed", type=int, default=0, metavar="N", help="of random weights and tokens"
    )
    group.addoption(
        "--bcg-buckets",
        default=None,
        metavar="N,N,...|FILE.json",
        help="token counts to capture in the conformance kit, as in bcg check --buckets",
    )
    group.addoption(
        "--bcg-page-size",
        type=int,
        default=None,
        metavar="N",
        help="tokens a KV page in the conformance kit; default: the smallest that all backends read in place",
    )
    group.addoption(
        "--bcg-case",
        action="append",
        default=[],
        metavar="NAME|FILE.json",
        help="case of the conformance kit, as in bcg check --case; repeatable; default: all",
    )
    group.addoption(
        "--bcg-debug",
        action="store_true",
        help="watch the conformance kit with every tool of bcg_core.debug, as bcg check --debug does",
    )
    group.addoption(
        "--bcg-report",
        default=None,
        metavar="FILE.json",
        help="write the results of the conformance kit here, in the form of bcg check --json",
    )
    group.addoption(
        "--bcg-mode",
        action="append",
        default=[],
        metavar="NAME",
        help="execution mode to benchmark, as in bcg bench --mode; repeatable; default: the usual ones",
    )
    group.addoption(
        "--bcg-workload",
        action="append",
        default=[],
        metavar="NAME",
        help="workload to benchmark, as in bcg bench --workload; repeatable; default: a table of all kinds",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the modules of ``--bcg-backend-class`` in the current directory, behind everything installed.

    Where a suite of this package was asked for, also keep OpenMP's threads from spinning, as ``bcg_harness.cli`` does
    and for the same reason: it works only before torch is imported. Such a suite refuses to be distributed.
    """
    if any(argument.startswith("bcg_harness.") for argument in config.args):
        if is_distributed(config):
            raise pytest.UsageError(DISTRIBUTED)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.getoption("--bcg-backend-class"):
        folder = str(config.invocation_params.dir)
        sys.path.append(folder)
        config.add_cleanup(lambda: sys.path.remove(folder))


def is_distributed(config: pytest.Config) -> bool:
    """Tell whether pytest-xdist runs the tests in several processes, of which this may be one."""
    if config.getoption("dist", "no") != "no" and config.getoption("tx", None):
        return True
    return hasattr(config, "workerinput")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn an error about an option's value into a failure that shows its message alone."""
    from bcg_core import BcgError

    try:
        yield
    except BcgError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for ``bcg_backend`` once for each variant of each selected backend."""
    if "bcg_backend" in metafunc.fixturenames:
        from bcg_harness.plugin_options import backends_of

        with usage_errors():
            usable, others = backends_of(metafunc.config)
        found = {candidate.label: candidate for candidate in usable}
        reasons = {result.backend: result for result in others}
        backends: dict[str, Candidate | CheckResult] = {**found, **reasons}
        metafunc.config.stash[_BACKENDS] = backends
        # By label, not by what is found: other plugins write parameters to files.
        metafunc.parametrize("bcg_backend", list(backends), indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one test of each function for a backend that cannot be used: it says why, once."""
    kept: list[pytest.Item] = []
    repeated: list[pytest.Item] = []
    seen: set[tuple[str, str]] = set()
    backends = config.stash.get(_BACKENDS, {})
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        label = params.get("bcg_backend")
        if label is not None and hasattr(backends[label], "outcome"):  # it cannot be used
            key = item.nodeid.partition("[")[0], label
            (repeated if key in seen else kept).append(item)
            seen.add(key)
        else:
            kept.append(item)
    if repeated:
        config.hook.pytest_deselected(items=repeated)
        items[:] = kept


@pytest.fixture(scope="session")
def bcg_device(request: pytest.FixtureRequest) -> "torch.device":
    """Return the device that ``--bcg-device`` names."""
    from bcg_harness.plugin_options import device_of

    with usage_errors():
        return device_of(request.config)


@pytest.fixture(scope="session")
def bcg_dtype(request: pytest.FixtureRequest) -> "torch.dtype":
    """Return the element type that ``--bcg-dtype`` names, or the device's default."""
    from bcg_harness.plugin_options import dtype_of

    with usage_errors():
        return dtype_of(request.config)


@pytest.fixture(scope="session")
def bcg_model(
    request: pytest.FixtureRequest, bcg_device: "torch.device", bcg_dtype: "torch.dtype"
) -> "LlamaModel":
    """Return the model that ``--bcg-model`` names; shared by all tests, which must not change it."""
    from bcg_harness.models import resolve_model

    name, seed = request.config.getoption("--bcg-model"), request.config.getoption("--bcg-seed")
    with usage_errors():
        return resolve_model(name, dtype=bcg_dtype, device=bcg_device, seed=seed).model


@pytest.fixture(scope="session")
def bcg_backend(request: pytest.FixtureRequest) -> "Candidate":
    """Return a backend with the options of one variant: one test for each.

    What is not installed skips, with its install hint, unless ``--bcg-backend`` asked for it; what fails to load fails.
    """
    from bcg_harness.candidates import Candidate
    from bcg_harness.outcome import Outcome

    found = request.config.stash[_BACKENDS][request.param]
    if isinstance(found, Candidate):
        return found
    if found.outcome is Outcome.SKIPPED:
        pytest.skip(f"{found.backend}: {found.detail}")
    pytest.fail(f"{found.backend}: {found.detail}", pytrace=False)
