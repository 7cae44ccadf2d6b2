"""Random generators inside a segment: what draws from them is recorded, what sets them is refused."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_core.errors import CaptureError


class GeneratorGuard:
    """Hold a segment to the generators that it may draw from, and those to the state they have.

    Nothing is drawn while a segment is recorded, so a generator in another state was seeded or set, or drawn from by
    another thread. Seeding is no operation, and is only seen afterwards: at the next draw, or at the end of the
    segment. What leaves the state as it is passes; CUDA passes the seed that is there already, too.

    Args:
        generators: what may be drawn from besides torch's default generator.

    Raises ValueError for a generator of another device.
    """

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = (torch.default_generator, *generators)
        self._before: list[Tensor] = []
        for generator in self._generators:
            if generator.device.type != "cpu":
                raise ValueError(
                    f"a generator of {generator.device} cannot be used in segments on the CPU"
                )

    def begin(self) -> None:
        """Note the state of all generators."""
        self._before = self._states()

    def end(self) -> None:
        """Give all generators the state they had at ``begin``, once: what was refused has no effect."""
        for generator, state in zip(self._generators, self._before, strict=False):
            generator.set_state(state)
        self._before = []

    def seeding(self) -> CaptureError | None:
        """Return the refusal of whatever set a generator since ``begin``, if anything did."""
        if all(map(torch.equal, self._states(), self._before)):
            return None
        return CaptureError(
            "a random generator was seeded or its state set inside a segment (torch.manual_seed, torch.seed, "
            "set_state, fork_rng; or another thread drew from it): a replay would not do so. Seed outside of captures, "
            "or in a break"
        )

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def stranger(self, operands: Any) -> CaptureError | None:
        """Return the refusal of a generator among ``operands`` that the engine was not given, if there is one."""
        known = {_identity(generator) for generator in self._generators}
        for leaf in pytree.tree_leaves(operands):
            if isinstance(leaf, torch.Generator) and _identity(leaf) not in known:
                return CaptureError(
                    "a segment draws from a generator that its engine does not know, so that replays would not advance "
                    "it: pass it to the engine (generators=[...]), use torch's default generator, or draw in a break"
                )
        return None


def _identity(generator: torch.Generator) -> int:
    """Return a number for ``generator``, of which there may be several Python objects."""
    return int(generator._cdata)  # type: ignore[attr-defined]  # not in torch's stubs
