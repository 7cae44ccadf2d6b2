"""What is recorded and what is refused in a segment: the emulator agrees with CUDA, line by line."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import CaptureError, CPUSegmentEngine, HostReadError
from bcg_harness.testing.capture_rules import (
    HOST_DATA,
    HOST_READS,
    ON_CUDA,
    RECORDED,
    REFUSED_BY_CUDA_ALONE,
    REFUSED_BY_THE_EMULATOR_ALONE,
    SEEDING,
    Run,
    record,
    try_by_name,
)


@pytest.mark.parametrize("run", HOST_READS.values(), ids=HOST_READS)
def test_the_emulator_refuses_what_reads_on_the_host(engine: CPUSegmentEngine, run: Run) -> None:
    with pytest.raises(HostReadError):
        record(engine, run)


@pytest.mark.parametrize("run", HOST_DATA.values(), ids=HOST_DATA)
def test_the_emulator_refuses_what_comes_from_the_host(engine: CPUSegmentEngine, run: Run) -> None:
    with pytest.raises(CaptureError, match="host data became a tensor"):
        record(engine, run)


@pytest.mark.parametrize("run", SEEDING.values(), ids=SEEDING)
def test_the_emulator_refuses_what_seeds(engine: CPUSegmentEngine, run: Run) -> None:
    with pytest.raises(CaptureError, match="a random generator was seeded or its state set"):
        record(engine, run)


@pytest.mark.parametrize(
    "run", REFUSED_BY_THE_EMULATOR_ALONE.values(), ids=REFUSED_BY_THE_EMULATOR_ALONE
)
def test_the_emulator_refuses_more_than_cuda_where_nobody_means_it(
    engine: CPUSegmentEngine, run: Run
) -> None:
    with pytest.raises(CaptureError):
        record(engine, run)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
@pytest.mark.parametrize("run", RECORDED.values(), ids=RECORDED)
def test_the_emulator_records_what_stays_on_the_device(
    engine: CPUSegmentEngine, run: Run, mode: type[torch.no_grad] | type[torch.inference_mode]
) -> None:
    with mode():
        check = record(engine, run)
        check()


@pytest.mark.parametrize("run", REFUSED_BY_CUDA_ALONE.values(), ids=REFUSED_BY_CUDA_ALONE)
def test_the_emulator_cannot_tell_the_host_from_the_device_by_name(
    engine: CPUSegmentEngine, run: Run
) -> None:
    record(engine, run)


class CountsTokensOfExperts:
    """A model that counts on the host how many tokens each of its experts gets."""

    def __init__(self, inner: Any) -> None:
        self.spec, self.inner = inner.spec, inner

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
        x_TD: Tensor = self.inner.forward(input_ids_T, positions_T, ctx)
        counts_E = torch.histc(x_TD.argmax(-1).float(), bins=16)
        return x_TD * counts_E

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        logits_BV: Tensor = self.inner.compute_logits(hidden_BD)
        return logits_BV


def test_a_model_that_counts_on_the_host_is_refused(
    make_runner: Callable[..., Any], toy_model: type[Any]
) -> None:
    with pytest.raises(HostReadError, match="histc without a range"):
        make_runner(model=CountsTokensOfExperts(toy_model()))


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Give processes in which a few captures are refused and no more."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=12) as processes:
        yield processes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ON_CUDA)
def test_cuda_does_what_the_table_says(processes: ProcessPoolExecutor, name: str) -> None:
    assert processes.submit(try_by_name, name, "cuda").result() is ON_CUDA[name][1]
