"""A backend whose constructor raises is an error of its own in every command, and hides no other."""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import ENTRY_POINT_GROUP, AttentionSpec, BackendLimits, registry
from bcg_harness.bench.record import BenchReport
from bcg_harness.cli import app
from bcg_harness.testing import MaskBackend

BENCH = ("bench", "--buckets", "16", "--seconds", "0", "--workload", "single-16", "--mode", "eager")
COMMANDS = {
    "check": ("check", "--buckets", "16", "--case", "one-token"),
    "bench": BENCH,
    "fuzz": ("fuzz", "--cases", "1", "--checks", "mechanism", "--buckets", "8"),
}


class Fragile(MaskBackend):
    """Fail where it is made."""

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        raise OSError("libvendor.so.3: cannot open shared object file")


@pytest.fixture
def bcg(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs the command where two plug-ins are installed, of which one cannot be made."""
    values = {
        "fragile": f"{__name__}:Fragile",
        "mask": "bcg_harness.testing:MaskBackend",
        "sdpa": "bcg_backends.sdpa:SDPABackend",
    }
    points = {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    monkeypatch.setattr(registry, "_installed", lambda: points)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("named", [True, False], ids=["asked-for", "found"])
def test_a_constructor_that_raises_is_an_error(
    bcg: Callable[..., Result], command: tuple[str, ...], named: bool
) -> None:
    names = ("--backend", "fragile", "--backend", "mask") if named else ()
    result = bcg(*command, *names)
    assert result.exit_code == 1, result.output
    assert "ERROR fragile" in result.output
    assert "libvendor.so.3" in result.output


def test_bench_measures_the_others_and_keeps_the_error(
    bcg: Callable[..., Result], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    result = bcg(*BENCH, "--json", str(out))
    report = BenchReport.load(out)
    assert {cell.backend for cell in report.cells} == {"mask", "sdpa"}
    assert list(report.broken) == ["fragile"]
    assert "2 measured, each between two passing checks, 1 errors" in result.output
