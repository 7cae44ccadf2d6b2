"""Readings of all quantities over a run, and how far each has grown."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcg_harness.errors import HarnessError
from bcg_harness.soak.quantity import MOST_SAMPLES, Quantity

SETTLING = 0.2
"""Part of a run in which caches may still fill up."""

LEAST_SAMPLES = 10
"""Readings below which there are too few behind the settling to tell growth from noise."""

_LEAST = 4
"""Readings after settling without which nothing can be said."""


def number_of_samples(asked: int | None, replays: int) -> int:
    """Return how many readings a run of ``replays`` has: ``asked``, or as many as there may be.

    Raises HarnessError for a number that says nothing, or that does not fit into the run.
    """
    most = min(MOST_SAMPLES, replays)
    number = most if asked is None else asked
    if not LEAST_SAMPLES <= number <= most:
        raise HarnessError(
            f"{number} samples of {replays} replays: take {LEAST_SAMPLES} to {MOST_SAMPLES}, and at most one a replay, "
            f"so ask for {LEAST_SAMPLES} replays or more"
        )
    return number


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Judge one quantity: its highest reading in the first quarter after settling, and in the last quarter.

    The highest, because what falls in between has not grown, and what rises for good shows wherever it began.

    Attributes:
        quantity: what was read.
        start: highest reading of the first quarter after settling.
        end: highest of the last quarter.
    """

    quantity: Quantity
    start: int
    end: int

    @property
    def growth(self) -> int:
        """Return by how much it grew; negative when it fell."""
        return self.end - self.start

    @property
    def within(self) -> bool:
        """Tell whether it grew by no more than is allowed."""
        return self.growth <= self.quantity.allowed

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "quantity": self.quantity.name,
            "unit": "bytes" if self.quantity.in_bytes else "count",
            "start": self.start,
            "end": self.end,
            "growth": self.growth,
            "allowed": self.quantity.allowed,
            "why": self.quantity.why,
            "within": self.within,
        }


class Samples:
    """Read quantities now and then, into memory that was there before the first reading: a leak of its own would count.

    Args:
        quantities: what is read.
        planned: how many readings there will be.
    """

    def __init__(self, quantities: Sequence[Quantity], planned: int) -> None:
        self.planned = planned
        self.taken = 0
        self._replays = _column("q", planned)
        self._seconds = _column("d", planned)
        self._values = {quantity: _column("q", planned) for quantity in quantities}

    def take(self, device: torch.device, *, replays: int, seconds: float) -> None:
        """Read everything; ``device`` must be idle, and garbage collected."""
        self._replays[self.taken] = replays
        self._seconds[self.taken] = seconds
        for quantity, column in self._values.items():
            column[self.taken] = quantity.read(device)
        self.taken += 1

    @property
    def settling(self) -> int:
        """Return how many readings belong to the settling."""
        return int(self.planned * SETTLING)

    def growths(self) -> list[Growth]:
        """Return how far each quantity has grown after settling; nothing when too little was read after that."""
        settled = self.taken - self.settling
        if settled < _LEAST:
            return []
        quarter = settled // 4
        return [
            Growth(
                quantity=quantity,
                start=max(column[self.taken - settled :][:quarter]),
                end=max(column[self.taken - quarter : self.taken]),
            )
            for quantity, column in self._values.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all readings, a list for each quantity, beside the replays and seconds until then."""
        return {
            "replays": list(self._replays[: self.taken]),
            "seconds": [round(second, 3) for second in self._seconds[: self.taken]],
            **{
                quantity.name: list(column[: self.taken])
                for quantity, column in self._values.items()
            },
        }


def _column(kind: str, length: int) -> array:  # type: ignore[type-arg]
    return array(kind, bytes(8 * length))
