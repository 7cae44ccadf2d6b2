"""What a ladder may cost."""

from dataclasses import dataclass
from math import isinf
from typing import Any

import numpy as np

from bcg_harness.errors import HarnessError
from bcg_harness.tune.costs import NANOSECONDS, Integers

UNLIMITED = 2**62
"""Stands for no limit among integers; no ladder takes as much of anything."""


@dataclass(frozen=True, kw_only=True)
class LadderBudgets:
    """Hold the limits of a ladder; None is no limit.

    Attributes:
        max_buckets: how many there may be.
        capture_seconds: of all buckets together.
        memory_bytes: of all buckets together.

    Raises HarnessError for a limit below 0.
    """

    max_buckets: int | None = None
    capture_seconds: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and not limit >= 0:  # so that NaN is refused too
                raise HarnessError(f"a budget has to be at least 0, but {name} is {limit}")

    @property
    def limits_k(self) -> Integers:
        """Return the limits of buckets, nanoseconds of capture and bytes, in this order."""
        seconds = self.capture_seconds
        nanoseconds = None if seconds is None else seconds * NANOSECONDS
        limits = (self.max_buckets, nanoseconds, self.memory_bytes)
        # Rounded, as capture times are.
        return np.array(
            [UNLIMITED if limit is None else round(min(limit, UNLIMITED)) for limit in limits],
            np.int64,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, in which no limit is null."""
        limits = vars(self).items()
        return {name: None if limit is None or isinf(limit) else limit for name, limit in limits}

    @property
    def limited(self) -> tuple[str, ...]:
        """Return the names of the limits there are."""
        return tuple(name for name, limit in self.to_json().items() if limit is not None)
