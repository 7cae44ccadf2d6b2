"""Which modes a run is about."""

import pytest
import torch

from bcg_harness.bench.modes import MODES, select_modes
from bcg_harness.errors import HarnessError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def names(chosen: list[str], device: torch.device = CPU) -> list[str]:
    return [mode.name for mode in select_modes(chosen, device)]


def test_eager_is_always_there_and_first() -> None:
    assert names(["breakable"]) == ["eager", "breakable"]


def test_the_order_is_that_of_tables() -> None:
    assert names(["full", "breakable", "padded_eager"]) == [
        mode for mode in MODES if mode in ("eager", "full", "breakable", "padded_eager")
    ]


def test_the_default_compiles_on_a_gpu_only() -> None:
    assert "compile_piecewise" in names([], CUDA)
    assert "compile_piecewise" not in names([], CPU)


def test_an_unknown_mode_is_refused_with_all_there_are() -> None:
    with pytest.raises(HarnessError, match="no mode 'faster'") as caught:
        names(["faster"])
    assert all(f"{mode.name}: {mode.summary}" in str(caught.value) for mode in MODES.values())


@pytest.mark.parametrize("name", MODES)
def test_every_mode_says_what_it_is(name: str) -> None:
    assert MODES[name].name == name
    assert MODES[name].summary
