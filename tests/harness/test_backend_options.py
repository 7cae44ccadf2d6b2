"""Options of a backend that stand in its label arrive typed, whichever command they are given to."""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from bcg_core import (
    ENTRY_POINT_GROUP,
    AttentionSpec,
    BackendLimits,
    BackendOptionError,
    registry,
)
from bcg_harness.candidates import label_of, parse_label
from bcg_harness.cli import app
from bcg_harness.errors import HarnessError
from bcg_harness.plugin_options import backends_of
from bcg_harness.testing import MaskBackend

COMMANDS = {
    "check": ("check", "--buckets", "16", "--case", "one-token"),
    "bench": ("bench", "--buckets", "16", "--seconds", "0", "--workload", "single-16"),
    "fuzz": ("fuzz", "--cases", "1", "--checks", "mechanism", "--buckets", "8"),
    "soak": ("soak", "--replays", "100", "--samples", "10", "--buckets", "3,8"),
}


class Typed(MaskBackend):
    """Fail, as a kernel would, unless options have their types."""

    def __init__(
        self,
        spec: AttentionSpec,
        limits: BackendLimits,
        device: torch.device,
        *,
        splits: int = 1,
        share: float | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__(spec, limits, device)
        if (type(splits), type(share), causal) != (int, float, True):
            raise TypeError(f"splits {splits!r}, share {share!r}, causal {causal!r}")


@pytest.fixture
def bcg(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs the command where a plug-in registers ``Typed``."""
    values = {"typed": f"{__name__}:Typed", "sdpa": "bcg_backends.sdpa:SDPABackend"}
    points = {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    monkeypatch.setattr(registry, "_installed", lambda: points)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_gives_options_their_types(
    bcg: Callable[..., Result], command: tuple[str, ...]
) -> None:
    result = bcg(*command, "--backend", "typed[splits=3,share=0.5,causal=true]")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_value_that_does_not_fit_is_wrong_use_with_an_example(
    bcg: Callable[..., Result], command: tuple[str, ...]
) -> None:
    result = bcg(*command, "--backend", "typed[splits=many]")
    assert result.exit_code == 2, result.output
    expected = "option splits is 'many', expected a whole number, as in typed[splits=1]"
    assert expected in " ".join(result.stderr.split())


def config(**options: Any) -> pytest.Config:
    """Return a configuration of pytest that has these options of the plugin."""
    known = {"backend": [], "backend_class": [], "device": "cpu", "require_cuda": False} | options
    names = {f"--bcg-{name.replace('_', '-')}": value for name, value in known.items()}
    return cast("pytest.Config", SimpleNamespace(getoption=names.__getitem__))


@pytest.mark.parametrize(
    ("option", "name"),
    [("backend", "typed"), ("backend_class", f"{__name__}:Typed")],
    ids=["backend", "backend-class"],
)
@pytest.mark.usefixtures("bcg")
def test_the_pytest_plugin_gives_options_their_types(option: str, name: str) -> None:
    usable, others = backends_of(config(**{option: [f"{name}[splits=3]"]}))
    assert [dict(candidate.options) for candidate in usable] == [{"splits": 3}]
    assert others == []


@pytest.mark.usefixtures("bcg")
def test_the_pytest_plugin_refuses_a_value_that_does_not_fit() -> None:
    with pytest.raises(BackendOptionError, match=r"as in typed\[splits=1\]"):
        backends_of(config(backend=["typed[splits=many]"]))


def test_an_option_that_is_there_twice_is_refused() -> None:
    with pytest.raises(HarnessError, match="has an option twice: keep one"):
        parse_label("typed[splits=1,splits=2]")


def test_a_label_shows_values_as_they_are_typed_in() -> None:
    options = {"causal": True, "share": None, "dtype": torch.float16, "splits": 3}
    label = "typed[causal=true,share=none,dtype=float16,splits=3]"
    assert label_of("typed", options) == label
