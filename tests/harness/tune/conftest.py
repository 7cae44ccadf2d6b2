"""Measured costs to tune with: numbers that are easy to follow, not measurements."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bcg_harness import Environment
from bcg_harness.bench.costs import BucketCost
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Spread
from bcg_harness.environment import describe_model
from bcg_llama import LlamaModel

MakeCost = Callable[..., BucketCost]


@pytest.fixture(scope="package")
def cost() -> MakeCost:
    """Return a function that makes the cost of a bucket; quartiles lie 10 % off the median."""

    def spread(seconds: float) -> Spread:
        return Spread(
            samples=9, median=seconds, p90=1.5 * seconds, q1=0.9 * seconds, q3=1.1 * seconds
        )

    def make(
        bucket: int,
        *,
        replay: float = 1.0,
        eager: float = 10.0,
        capture: float = 1.0,
        memory: int = 0,
        backend: str = "sdpa",
    ) -> BucketCost:
        return BucketCost(
            bucket=bucket,
            backend=backend,
            replay=spread(replay),
            eager=spread(eager),
            capture_seconds=capture,
            memory_bytes=memory,
        )

    return make


@pytest.fixture
def costs_file(small_model: LlamaModel, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes what ``bcg bench --json`` writes, with these bucket costs."""

    def write(*costs: BucketCost) -> Path:
        report = BenchReport(
            started="2026-01-01T00:00:00+00:00",
            seconds=1.0,
            environment=Environment.of(torch.device("cpu")).to_json(),
            model={"name": "tiny", **describe_model(small_model.spec)},
            settings={"buckets": [cost.bucket for cost in costs] or [16], "page_size": 16},
            workloads=(),
            skipped={},
            notes={},
            setups=(),
            cells=(),
            break_overhead=None,
            bucket_costs=costs,
            timelines=(),
        )
        path = tmp_path / "costs.json"
        path.write_text(json.dumps(report.to_json()))
        return path

    return write
