"""What a bench run found, as it is written to JSON and read back: the one format of tables, reports and ``bcg tune``.

All times are seconds, all sizes bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from bcg_harness.bench.spread import Speedup, Spread
from bcg_harness.errors import HarnessError
from bcg_harness.json_file import read_json
from bcg_harness.typed_json import from_json, to_json

KIND = "bcg bench"
SCHEMA = 1
INTERRUPTED = "interrupted"
_WITHOUT_GRAPHS = ("eager", "padded_eager")
"""What serves the batches of modes that have no graphs to begin with."""
NO_BACKEND = "-"
"""Stands for the backend of a mode that brings its own attention."""


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


@dataclass(frozen=True, kw_only=True)
class BucketRecord:
    """Hold one captured bucket of a mode.

    Attributes:
        bucket: T, padded tokens.
        segments: recorded segments.
        breaks: recorded breaks.
        seconds: time of the capture.
        memory_bytes: by how much it made the graphs' memory grow.
    """

    bucket: int
    segments: int
    breaks: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModeSetup:
    """Hold what it took to make a mode ready for a backend.

    Attributes:
        backend: label of the backend; ``NO_BACKEND`` where one set-up serves all.
        mode: name of the mode.
        warm_up_seconds: before the first capture: compilation and first calls.
        capture_seconds: of all buckets.
        graph_memory: device memory that graphs hold; None where it is not known.
        buckets: what was captured, largest first; empty for modes that capture lazily or not at all.
        failed: buckets that could not be captured, with the reason.
    """

    backend: str
    mode: str
    warm_up_seconds: float = 0.0
    capture_seconds: float = 0.0
    graph_memory: int | None = None
    buckets: tuple[BucketRecord, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Hold what one bucket costs when a single request fills it; what ``bcg tune`` works with.

    Attributes:
        bucket: T, padded tokens.
        backend: that served it.
        replay: latency of a breakable prefill of T tokens.
        eager: latency of an eager prefill of T tokens.
        capture_seconds: time of its capture.
        memory_bytes: graph memory that it added in a capture from the largest bucket to the smallest.
    """

    bucket: int
    backend: str
    replay: Spread
    eager: Spread
    capture_seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class BreakOverhead:
    """Hold what a break costs when it does nothing.

    Attributes:
        bucket: T of the replayed graph.
        breaks: breaks in it.
        host_per_break: host time of a replay without attention, over the number of breaks.
        wall_per_break: by how much such a replay takes longer than one graph without breaks, per break; None where
            the two are too close to tell.
    """

    bucket: int
    breaks: int
    host_per_break: float
    wall_per_break: float | None


@dataclass(frozen=True, kw_only=True)
class Span:
    """Hold one bar of a time line.

    Attributes:
        lane: "host" for segments and breaks as the host launches them, "device" for what the device runs.
        name: of a segment ("segment 3"), a break ("break 3"), a phase of the host ("load", "head") or a kernel.
        start: since the beginning of the prefill.
        seconds: how long.
    """

    lane: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Hold where the time of one replay went.

    Attributes:
        backend: label.
        mode: name.
        workload: name.
        spans: bars of all lanes, by start.
    """

    backend: str
    mode: str
    workload: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class WorkloadRecord:
    """Describe a workload that was measured.

    Attributes:
        name: in tables and ``--workload``.
        description: in words.
        steps: timed batches; of each the (prefix, new tokens) of its requests.
    """

    name: str
    description: str
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def real_tokens(self) -> int:
        """Return the new tokens of all timed batches."""
        return sum(new for step in self.steps for _, new in step)


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """Hold a bench run and its context.

    Attributes:
        started: local date and time, ISO 8601.
        seconds: wall-clock time of the run.
        environment: of ``Environment.to_json``.
        model: of ``describe_model``, with the name as it was asked for.
        settings: whatever else was chosen: ladder, page size, rounds, seed.
        workloads: what was measured.
        skipped: backends that could not be used, with the reason.
        notes: what backends say of themselves, by label.
        setups: what it took to make each mode ready.
        cells: all measurements.
        break_overhead: None where breakable was not measured.
        bucket_costs: empty unless they were asked for.
        timelines: one of each backend that breakable was measured with.
        end: what ended the run before its last cell, ``INTERRUPTED`` for Ctrl-C; None when nothing did.
    """

    started: str
    seconds: float
    environment: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    workloads: tuple[WorkloadRecord, ...]
    skipped: Mapping[str, str]
    notes: Mapping[str, list[str]]
    setups: tuple[ModeSetup, ...]
    cells: tuple[Cell, ...]
    break_overhead: BreakOverhead | None
    bucket_costs: tuple[BucketCost, ...]
    timelines: tuple[Timeline, ...]
    end: str | None = None

    def backends(self) -> list[str]:
        """Return the labels of all backends with cells, in order."""
        return list(dict.fromkeys(cell.backend for cell in self.cells))

    def modes(self) -> list[str]:
        """Return the names of all modes with cells, in order."""
        return list(dict.fromkeys(cell.mode for cell in self.cells))

    def cell(self, backend: str, mode: str, workload: str) -> Cell | None:
        """Return one cell; None where there is none."""
        wanted = (backend, mode, workload)
        found = (c for c in self.cells if (c.backend, c.mode, c.workload) == wanted)
        return next(found, None)

    @property
    def libraries(self) -> Mapping[str, Any]:
        """Return installed versions by distribution, as far as the environment says."""
        found = self.environment.get("libraries")
        return found if isinstance(found, Mapping) else {}

    def to_json(self) -> dict[str, Any]:
        """Return all of it as a JSON object that ``from_json`` reads."""
        cells = [cell.to_json() for cell in self.cells]
        return {"kind": KIND, "schema": SCHEMA, **to_json(self), "cells": cells}

    @classmethod
    def from_json(cls, raw: Any) -> "BenchReport":
        """Read what ``to_json`` returned; raises HarnessError for anything else."""
        if not isinstance(raw, dict) or raw.get("kind") != KIND:
            raise HarnessError("this is no result of `bcg bench --json`")
        if raw.get("schema") != SCHEMA:
            raise HarnessError(
                f"written in format {raw.get('schema')}, this version reads {SCHEMA}: run bcg bench again"
            )
        try:
            return from_json(cls, raw)
        except HarnessError as error:
            raise HarnessError(f"damaged result of bcg bench: {error}") from error

    @classmethod
    def load(cls, path: Path) -> "BenchReport":
        """Read a file of ``bcg bench --json``; raises HarnessError, which names it, for anything else."""
        raw = read_json(path)
        try:
            return cls.from_json(raw)
        except HarnessError as error:
            raise HarnessError(f"{path}: {error}") from error
