"""Pytest options and fixtures for tests of attention backends.

Loaded in every project of its environment: all names carry a prefix, and nothing heavy is imported before a fixture is
used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from bcg_harness.candidates import Candidate
    from bcg_llama import LlamaModel


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
        "--bcg-device", default="cpu", metavar="NAME", help="cpu (emulated graphs) or cuda"
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


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn an error about an option's value into a failure that shows its message alone."""
    from bcg_core import BcgError

    message = None
    try:
        yield
    except BcgError as error:
        message = str(error)
    if message is not None:
        pytest.fail(message, pytrace=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that ask for ``bcg_backend`` once for each variant of each selected backend."""
    if "bcg_backend" in metafunc.fixturenames:
        from bcg_core import BackendRegistry
        from bcg_harness.candidates import select_backends
        from bcg_harness.selection import parse_device

        asked_for = metafunc.config.getoption("--bcg-backend")
        registry = BackendRegistry()
        with usage_errors():
            usable, others = select_backends(
                asked_for or registry.names(),
                registry,
                device=parse_device(metafunc.config.getoption("--bcg-device")),
                required=bool(asked_for),
                option_prefix="--bcg-",
            )
        found = {candidate.label: candidate for candidate in usable}
        reasons = {result.backend: result for result in others}
        params = {**found, **reasons}
        metafunc.parametrize(
            "bcg_backend", params.values(), ids=params, indirect=True, scope="session"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one test of each function for a backend that cannot be used: it says why, once."""
    kept: list[pytest.Item] = []
    repeated: list[pytest.Item] = []
    seen: set[tuple[str, str]] = set()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        found: Any = params.get("bcg_backend")
        if hasattr(found, "outcome"):  # what select_backends says of what it does not return
            key = item.nodeid.partition("[")[0], found.backend
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
    from bcg_harness.selection import parse_device

    with usage_errors():
        return parse_device(request.config.getoption("--bcg-device"))


@pytest.fixture(scope="session")
def bcg_dtype(request: pytest.FixtureRequest, bcg_device: "torch.device") -> "torch.dtype":
    """Return the element type that ``--bcg-dtype`` names, or the device's default."""
    from bcg_harness.selection import parse_dtype

    with usage_errors():
        return parse_dtype(request.config.getoption("--bcg-dtype"), bcg_device)


@pytest.fixture(scope="session")
def bcg_model(
    request: pytest.FixtureRequest, bcg_device: "torch.device", bcg_dtype: "torch.dtype"
) -> "LlamaModel":
    """Return the model that ``--bcg-model`` names; shared by all tests, which must not change it."""
    from bcg_harness.models import resolve_model

    name = request.config.getoption("--bcg-model")
    with usage_errors():
        return resolve_model(name, dtype=bcg_dtype, device=bcg_device).model


@pytest.fixture(scope="session")
def bcg_backend(request: pytest.FixtureRequest) -> "Candidate":
    """Return a backend with the options of one variant: one test for each.

    What is not installed skips, with its install hint, unless ``--bcg-backend`` asked for it; what fails to load fails.
    """
    from bcg_harness.candidates import Candidate
    from bcg_harness.outcome import Outcome

    found = request.param
    if isinstance(found, Candidate):
        return found
    if found.outcome is Outcome.SKIPPED:
        pytest.skip(f"{found.backend}: {found.detail}")
    pytest.fail(f"{found.backend}: {found.detail}", pytrace=False)
