"""All execution modes by name, and which of them a run is about."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from bcg_harness.bench.compile_mode import CompilePiecewise
from bcg_harness.bench.foreign_mode import BreakableMeta
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.runner_modes import (
    Breakable,
    BreakableUnfused,
    Eager,
    EagerFused,
    Full,
    PaddedEager,
)
from bcg_harness.bench.transformers_mode import TransformersEager
from bcg_harness.errors import HarnessError

MODES: Mapping[str, type[ExecutionMode]] = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            Eager,
            EagerFused,
            PaddedEager,
            Breakable,
            BreakableUnfused,
            Full,
            CompilePiecewise,
            TransformersEager,
            BreakableMeta,
        )
    }
)
"""In the order of tables; ``eager`` is what all others are compared with."""

BASELINE = Eager.name
_DEFAULT = ("eager", "padded_eager", "breakable", "full")
_DEFAULT_ON_GPU = (*_DEFAULT, "compile_piecewise", "transformers_eager")


def select_modes(names: Sequence[str], device: torch.device) -> list[type[ExecutionMode]]:
    """Return the modes called ``names`` in the order of tables, ``eager`` always among them; default by device.

    Raises HarnessError, with all modes and what they are, for a name that is none.
    """
    chosen = names or (_DEFAULT_ON_GPU if device.type == "cuda" else _DEFAULT)
    for name in chosen:
        if name not in MODES:
            known = "\n".join(f"  {mode.name}: {mode.summary}" for mode in MODES.values())
            raise HarnessError(f"no mode {name!r}; possible are\n{known}")
    return [mode for name, mode in MODES.items() if name in chosen or name == BASELINE]
