"""Padded-row poison: a row that nobody wrote shows in a result that is not finite.

Shape letters: T bucket (padded) tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import Mode, PaddingLeakError, Workspace
from bcg_core.debug import PaddingPoison, WatchedRunner, poison
from bcg_harness.testing import ForgetsPaddedOutput

Make = Callable[..., Any]


class WatchedForgetsPaddedOutput(WatchedRunner, ForgetsPaddedOutput):
    """Watched, and at fault."""


@pytest.fixture
def leaky(toy_model: type[Any]) -> Any:
    """Return a model that reads the attention output of the row behind each row."""

    class Leaky(toy_model):
        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            hidden_TD = super().forward(input_ids_T, positions_T, ctx)
            return hidden_TD + 0 * ctx.io.out_TX.sum()

    return Leaky()


@pytest.mark.parametrize("lengths", [(5,), (2, 3), (8,), (1,), (9,), (17,), ()], ids=str)
def test_what_is_right_is_accepted(
    make_watched: Make, make_batch: Make, lengths: tuple[int, ...]
) -> None:
    make_watched(tools=[PaddingPoison()]).prefill(make_batch(*lengths))


def test_a_reduction_over_cleared_rows_is_accepted(
    make_watched: Make, make_batch: Make, leaky: Any
) -> None:
    make_watched(model=leaky, tools=[PaddingPoison()]).prefill(make_batch(3))


def test_output_rows_that_are_not_cleared_are_found(make_watched: Make, make_batch: Make) -> None:
    runner = make_watched(WatchedForgetsPaddedOutput, tools=[PaddingPoison()])
    with pytest.raises(
        PaddingLeakError, match=r"padded rows \[3, 4, 5, 6, 7\] .* 3 tokens in bucket 8"
    ):
        runner.prefill(make_batch(3))


def test_output_rows_that_reach_real_ones_are_found(
    make_watched: Make, make_batch: Make, leaky: Any
) -> None:
    runner = make_watched(WatchedForgetsPaddedOutput, model=leaky, tools=[PaddingPoison()])
    with pytest.raises(PaddingLeakError, match=r"real rows \[0, 1, 2\]"):
        runner.prefill(make_batch(3))


def test_a_full_bucket_has_nothing_to_leak(make_watched: Make, make_batch: Make) -> None:
    make_watched(WatchedForgetsPaddedOutput, tools=[PaddingPoison()]).prefill(make_batch(8))


def test_eager_prefills_are_left_alone(make_watched: Make, make_batch: Make) -> None:
    runner = make_watched(WatchedForgetsPaddedOutput, tools=[PaddingPoison()])
    runner.workspace.boundary.fill_(float("nan"))
    runner.prefill(make_batch(3), mode=Mode.PADDED_EAGER)


def test_the_runner_goes_on_after_a_leak(make_watched: Make, make_batch: Make) -> None:
    runner = make_watched(WatchedForgetsPaddedOutput, tools=[PaddingPoison()])
    with pytest.raises(PaddingLeakError):
        runner.prefill(make_batch(3))
    assert runner.prefill(make_batch(8)).admission.bucket == 8


@pytest.fixture
def poisoned(toy_model: type[Any]) -> Workspace:
    spec = toy_model().spec
    workspace = Workspace(spec, 16)
    poison(workspace, spec, 8, page=3, page_size=4)
    return workspace


def test_poison_is_everywhere(poisoned: Workspace) -> None:
    buffers = (poisoned.boundary.qkv_MX, poisoned.boundary.out_MX, poisoned.hidden_MD)
    assert all(buffer.isnan().all() for buffer in buffers)


def test_poisoned_indices_are_valid_and_wrong(poisoned: Workspace) -> None:
    inputs = poisoned.inputs(8)
    assert inputs.input_ids_T.tolist() == [60] * 8
    assert inputs.positions_T.tolist() == [63] * 8
    assert inputs.slot_mapping_T.tolist() == [12, 13, 14, 15] * 2


def test_more_rows_than_the_workspace_has_leave_the_indices_alone(toy_model: type[Any]) -> None:
    spec = toy_model().spec
    workspace = Workspace(spec, 8)
    poison(workspace, spec, 9, page=3, page_size=4)
    assert not workspace.inputs(8).packed.any()
    assert torch.isnan(workspace.hidden_MD).all()
