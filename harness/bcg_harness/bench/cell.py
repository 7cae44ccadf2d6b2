"""What a bench measures of one mode with one backend on one workload. Times are seconds, sizes bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bcg_harness.bench.spread import Speedup, Spread
from bcg_harness.typed_json import to_json

NO_BACKEND = "-"
"""Stands for the backend of a mode that brings its own attention."""
_WITHOUT_GRAPHS = ("eager", "padded_eager")
"""What serves the batches of modes that have no graphs to begin with."""


class Status(Enum):
    """Say what became of one mode on one workload."""

    MEASURED = "measured"
    UNAVAILABLE = "unavailable"
    """The mode cannot serve this: no fault, and the reason is given."""
    FAILED = "failed"
    """Its result was wrong, so it has no times."""
    ERROR = "error"
    """It raised."""


@dataclass(frozen=True, kw_only=True)
class CheckSummary:
    """Hold the worst comparison of a cell's results with the reference.

    Attributes:
        error: relative L2 error.
        budget: the most it may be.
        what: which comparison it is.
    """

    error: float
    budget: float
    what: str

    @property
    def load(self) -> float:
        """Return the error as a fraction of the budget."""
        return self.error / self.budget


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """Hold what the profiler saw in one prefill of the workload, apart from the timed rounds.

    Attributes:
        busy: union of all kernels and copies on the device.
        gap: median latency less ``busy``: time in which the device waits for the host.
        launches: calls of the host that put work on the device; a graph counts once.
        kernels: kernels and copies that ran.
    """

    busy: float
    gap: float
    launches: int
    kernels: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Hold one mode with one backend on one workload.

    Attributes:
        backend: label of the backend, ``NO_BACKEND`` for a mode with attention of its own.
        mode: name of the mode.
        workload: name of the workload.
        status: what became of it; all measures below are None, 0 or empty unless it was measured.
        reason: why it was not.
        check: the passing check that the times rest on, or the failing one.
        latency: synchronised wall clock of all timed batches of the workload, from batch to sampled tokens.
        ttft: time to first token of each request: from token ids in host memory to its first sampled token there.
        enqueue: host time until everything was queued.
        step_latency: median latency of each timed batch.
        device: from the profiler; None without one.
        real_tokens: R, new tokens of the timed batches.
        padded_tokens: T, rows that were computed for them.
        served: how often each bucket or fallback reason served a timed batch.
        peak_memory: most device memory allocated during the workload, weights and cache included; None on a CPU.
        speedup: against eager with the same backend; None for eager itself and where eager was not measured.
    """

    backend: str
    mode: str
    workload: str
    status: Status
    reason: str = ""
    check: CheckSummary | None = None
    latency: Spread | None = None
    ttft: Spread | None = None
    enqueue: Spread | None = None
    step_latency: tuple[float, ...] = ()
    device: DeviceTime | None = None
    real_tokens: int = 0
    padded_tokens: int = 0
    served: Mapping[str, int] = field(default_factory=dict)
    peak_memory: int | None = None
    speedup: Speedup | None = None

    @property
    def fallbacks(self) -> dict[str, int]:
        """Return why timed batches of a mode with graphs ran without one, and how many of them."""
        return {
            why: count
            for why, count in self.served.items()
            if why not in _WITHOUT_GRAPHS and not why.startswith(("bucket ", "transformers"))
        }

    @property
    def padding(self) -> float:
        """Return padded rows as a fraction of all rows computed."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Return real tokens over the median latency."""
        return None if self.latency is None else self.real_tokens / self.latency.median

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with what follows from the rest added for readers."""
        derived = {"padding": self.padding, "tokens_per_second": self.tokens_per_second}
        return {**to_json(self), **derived}
