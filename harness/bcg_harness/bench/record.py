"""What a bench run found, as it is written to JSON and read back: the one format of tables, reports and ``bcg tune``.

All times are seconds, all sizes bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcg_harness.bench.cell import Cell
from bcg_harness.bench.costs import BreakOverhead, BucketCost
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.bench.timeline import Timeline
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.errors import HarnessError
from bcg_harness.json_file import read_json
from bcg_harness.typed_json import from_json, to_json

KIND = "bcg bench"
SCHEMA = 1
INTERRUPTED = "interrupted"


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
        broken: backends that raised where they were loaded or made, with what they raised.
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
    broken: Mapping[str, str] = field(default_factory=dict)
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
