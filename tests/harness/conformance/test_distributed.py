"""pytest-xdist is refused with what to do: its workers would each write the report, and nobody the counts.

A plug-in with the options of xdist stands in for it, as it is no dependency.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bcg_harness.pytest_plugin import is_distributed

RunKit = Callable[..., Any]
ONE = ["--bcg-backend", "right", "--bcg-case", "one-token", "-p", "no:xdist", "-p", "like_xdist"]
LIKE_XDIST = """
def pytest_addoption(parser):
    parser.addoption("--dist", default="no")
    parser.addoption("--tx", action="append", default=[])
    parser.addoption("--as-worker", action="store_true")


def pytest_collection(session):
    # A worker is told after the start here, as a kit that is found in a folder is loaded then.
    if session.config.getoption("--as-worker"):
        session.config.workerinput = {}
"""


@pytest.fixture
def like_xdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "like_xdist.py").write_text(LIKE_XDIST)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("like_xdist")
def test_a_distributed_run_is_a_usage_error_that_says_what_to_do(run_kit: RunKit) -> None:
    run = run_kit(*ONE, "--dist", "load", "--tx", "popen")
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert "cannot be distributed by pytest-xdist" in run.output
    assert "Add -n 0" in run.output
    assert "Traceback" not in run.output


@pytest.mark.usefixtures("like_xdist")
def test_a_worker_collects_nothing(run_kit: RunKit) -> None:
    run = run_kit(*ONE, "--as-worker")
    assert run.status == pytest.ExitCode.INTERRUPTED
    assert "cannot be distributed by pytest-xdist" in run.output
    assert "Traceback" not in run.output


@pytest.mark.usefixtures("like_xdist")
def test_xdist_without_workers_is_no_hindrance(run_kit: RunKit) -> None:
    assert run_kit(*ONE).status == pytest.ExitCode.OK


def config_of(*, worker: bool, **options: Any) -> pytest.Config:
    found = {"workerinput": {}} if worker else {}
    getoption = options.get
    return cast(pytest.Config, SimpleNamespace(getoption=getoption, **found))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of(worker=False), False),
        (config_of(worker=False, dist="no", tx=[]), False),
        (config_of(worker=False, dist="load", tx=[]), False),
        (config_of(worker=False, dist="load", tx=["popen", "popen"]), True),
        (config_of(worker=True), True),
    ],
    ids=["no-xdist", "no-workers", "nowhere", "controller", "worker"],
)
def test_distribution_is_seen_from_the_configuration(config: pytest.Config, expected: bool) -> None:
    assert is_distributed(config) is expected
