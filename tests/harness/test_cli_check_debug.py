"""``bcg check --debug``: the matrix with every debug tool on."""

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, registry
from bcg_harness.cli import app

QUICK = ["check", "--buckets", "16,64", "--case", "two-requests"]


@pytest.fixture
def bcg() -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*QUICK, *arguments])

    return run


@pytest.fixture
def writes_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a backend that writes to the KV cache the only registered one."""
    value = "bcg_harness.testing:WritesCache"
    points = {"writes": [EntryPoint("writes", value, ENTRY_POINT_GROUP)]}
    monkeypatch.setattr(registry, "_installed", lambda: points)


def test_a_right_backend_passes(bcg: Callable[..., Result]) -> None:
    result = bcg("--debug", "--backend", "sdpa")
    assert result.exit_code == 0, result.output
    assert "8 passed, 0 failed" in result.output
    assert "watched by all debug tools" in " ".join(result.output.split())


@pytest.mark.usefixtures("writes_cache")
def test_what_a_tool_finds_is_an_error_of_the_case(bcg: Callable[..., Result]) -> None:
    result = bcg("--debug")
    assert result.exit_code == 1
    assert "writes / two-requests / step 0" in result.output
    assert "changed, of pages [" in result.output


@pytest.mark.usefixtures("writes_cache")
def test_without_the_option_no_tool_is_on(bcg: Callable[..., Result]) -> None:
    assert "changed, of pages [" not in bcg().output
