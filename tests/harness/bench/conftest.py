"""Fixtures of the speed harness's tests."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bcg_core import TokenBuckets
from bcg_harness.bench.bench import Bench
from bcg_harness.bench.families import parse_workload
from bcg_harness.bench.mode import ExecutionMode
from bcg_harness.bench.timing import Effort
from bcg_harness.tokens import RandomTokens
from bcg_llama import PRESETS, LlamaModel, random_llama

CPU = torch.device("cpu")
QUICK = Effort(seconds=0.0, least=3, most=3)


@pytest.fixture(scope="package")
def two_layers() -> LlamaModel:
    """Return a model of two layers; tests must not change it."""
    return random_llama(replace(PRESETS["tiny"], num_layers=2, max_positions=512))


@pytest.fixture
def make_bench(two_layers: LlamaModel) -> Callable[..., Bench]:
    """Return a function that makes a bench of modes and workloads by name, with three rounds each."""

    def make(modes: list[type[ExecutionMode]], *workloads: str, effort: Effort = QUICK) -> Bench:
        return Bench(
            two_layers,
            [parse_workload(name) for name in workloads or ("single-16",)],
            modes,
            RandomTokens(two_layers.spec.vocab_size),
            buckets=TokenBuckets([16, 64]),
            page_size=16,
            effort=effort,
        )

    return make
