"""Budgets pass what rounding does, and nothing else."""

import math

import pytest
import torch
from torch import Tensor

from bcg_harness import Comparison, Errors, bit_equal, compare
from bcg_harness.budgets import Measured, RowErrors, worst
from bcg_harness.budgets import judge as judge_measured

EXACT = Errors(whole=0.0, row=0.0)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def exact_RX() -> Tensor:
    return torch.randn(240, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rounded(exact_RX: Tensor, dtype: torch.dtype) -> Tensor:
    """Round in another way than ``to`` does: halve in low precision, then add both halves with a detour."""
    third = (exact_RX / 3).to(dtype)
    return third + third + third


def judge(actual_RX: Tensor, exact_RX: Tensor, dtype: torch.dtype) -> Comparison:
    low = Errors.between(exact_RX.to(dtype), exact_RX)
    return compare(actual_RX, exact_RX, low=low, what="it")


def test_rounding_is_within_budget(exact_RX: Tensor, dtype: torch.dtype) -> None:
    assert judge(rounded(exact_RX, dtype), exact_RX, dtype).within


def test_a_wrong_row_exceeds_the_budget(exact_RX: Tensor, dtype: torch.dtype) -> None:
    actual = exact_RX.to(dtype)
    actual[100] = actual[101]
    assert not judge(actual, exact_RX, dtype).within


def test_a_wrong_row_is_named_as_such(exact_RX: Tensor) -> None:
    actual = exact_RX.float()
    actual[100, 3] += 1e-4
    assert judge(actual, exact_RX, torch.float32).what == "it, worst row 100"


def test_a_wrong_row_is_named_beside_an_error_of_all_rows(exact_RX: Tensor) -> None:
    actual = exact_RX.float() * (1 + 2**-18)
    actual[100] *= 1 + 2**-17
    low = Errors(whole=0.0, row=1e-5)
    comparison = compare(actual, exact_RX, low=low, what="it", position=7)
    assert (comparison.what, comparison.worst) == ("it", "row 100 (position 107)")


def test_rows_and_heads_that_are_not_finite_are_named() -> None:
    actual = torch.zeros(80, 3, 4)
    actual[60, 1, 2], actual[79, 0, 0] = math.nan, -math.inf
    comparison = compare(actual, torch.ones(80, 3, 4), low=EXACT, what="it", position=16)
    assert comparison.not_finite == (
        "2 of 80 rows are not finite in heads 0, 1, first row 60 (position 76)"
    )


def test_a_single_row_that_is_not_finite_in_all_heads_is_named(exact_RX: Tensor) -> None:
    actual = exact_RX.float()
    actual[239] = math.nan
    comparison = compare(actual, exact_RX, low=EXACT, what="it")
    assert comparison.not_finite == "1 of 240 rows is not finite, first row 239"


def test_nothing_is_said_of_rows_that_are_finite_though_wrong() -> None:
    comparison = compare(torch.ones(3, 4), torch.zeros(3, 4), low=EXACT, what="it")
    assert (comparison.error, comparison.not_finite) == (math.inf, "")


def test_an_error_everywhere_exceeds_the_budget(exact_RX: Tensor, dtype: torch.dtype) -> None:
    actual = exact_RX.to(dtype) * (1 + 4 * torch.finfo(dtype).eps)
    assert not judge(actual, exact_RX, dtype).within


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(exact_RX: Tensor, value: float) -> None:
    actual = exact_RX.float()
    actual[7, 7] = value
    assert not compare(actual, exact_RX, low=Errors(whole=1.0, row=1.0), what="it").within


def test_nan_in_the_reference_never_passes(exact_RX: Tensor) -> None:
    exact_RX[3, 3] = math.nan
    comparison = compare(exact_RX.float(), exact_RX, low=Errors(whole=1.0, row=1.0), what="it")
    assert not comparison.within


def test_an_infinite_budget_passes_nothing_infinite(exact_RX: Tensor) -> None:
    low = Errors(whole=math.inf, row=math.inf)
    assert not compare(exact_RX[:5].float(), exact_RX, low=low, what="it").within


def test_another_shape_never_passes(exact_RX: Tensor) -> None:
    assert not compare(exact_RX[:-1].float(), exact_RX, low=EXACT, what="it").within


def test_zeros_that_are_zeros_have_no_error() -> None:
    zeros = torch.zeros(3, 4)
    assert compare(zeros, zeros.double(), low=EXACT, what="it").load == 0


def test_zeros_that_should_be_zeros_never_pass_otherwise() -> None:
    assert not compare(torch.full((3, 4), 1e-30), torch.zeros(3, 4), low=EXACT, what="it").within


def test_one_rounding_step_is_allowed_where_the_reference_is_exact() -> None:
    ones = torch.ones(3, 4, dtype=torch.float64)
    assert compare(ones.float() * (1 - 2**-24), ones, low=EXACT, what="it").within
    assert not compare(ones.float() * (1 + 2**-23), ones, low=EXACT, what="it").within


def test_the_worst_stretch_is_found_wherever_it_is() -> None:
    expected = torch.ones(10, 1, dtype=torch.float64)
    actual = expected.clone()
    actual[6] += 0.5
    actual[7] += 0.5
    errors = RowErrors.between(actual, expected)
    assert errors.worst_stretch(1) == pytest.approx(0.5)
    assert errors.worst_stretch(2) == pytest.approx(0.5)
    assert errors.worst_stretch(4) == pytest.approx(0.5 / math.sqrt(2))


def test_a_stretch_longer_than_the_data_says_nothing() -> None:
    ones = torch.ones(3, 1)
    assert RowErrors.between(2 * ones, ones).worst_stretch(4) == 0


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        pytest.param(torch.tensor([0.0, 1.0]), True, id="same"),
        pytest.param(torch.tensor([-0.0, 1.0]), False, id="sign-of-zero"),
        pytest.param(torch.tensor([0.0, 1.0 + 2**-23]), False, id="last-bit"),
        pytest.param(torch.tensor([0.0, 1.0, 2.0]), False, id="shape"),
        pytest.param(torch.tensor([0.0, 1.0], dtype=torch.float64), False, id="dtype"),
    ],
)
def test_bit_equal_compares_bits(other: Tensor, equal: bool) -> None:
    assert bit_equal(torch.tensor([0.0, 1.0]), other) is equal


def test_bit_equal_takes_strided_views(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype).view(3, 4)
    assert bit_equal(tensor[:, 1:3], tensor.clone()[:, 1:3])


def measured(found: float, low: float) -> Measured:
    errors = [Errors(whole=error, row=error) for error in (found, low)]
    return Measured(found=errors[0], low=errors[1], dtype=torch.float32, what="rows")


def test_a_lucky_low_precision_result_does_not_narrow_the_budget_of_its_rows() -> None:
    assert not judge_measured([measured(3e-6, 0.0)]).within
    assert judge_measured([measured(3e-6, 0.0), measured(0.0, 2e-6)]).within


def test_every_measurement_is_judged() -> None:
    assert not judge_measured([measured(0.0, 1e-6), measured(1e-3, 1e-6)]).within


def test_what_is_not_finite_is_never_within() -> None:
    assert not judge_measured([measured(math.inf, math.inf)]).within


@pytest.mark.parametrize("spoiled", [math.inf, math.nan])
def test_a_low_precision_result_that_is_not_finite_does_not_hide_the_first_wrong_one(
    spoiled: float,
) -> None:
    first, behind = measured(math.inf, 1e-6), measured(math.inf, spoiled)
    comparison = judge_measured([first, behind])
    assert not comparison.within
    assert comparison.judgeable
    assert comparison.load == math.inf


@pytest.mark.parametrize("error", [0.0, 1e-9, 0.4, math.inf, math.nan])
@pytest.mark.parametrize("budget", [math.inf, math.nan, 0.51])
def test_a_budget_that_cannot_judge_passes_nothing(error: float, budget: float) -> None:
    comparison = Comparison(error=error, budget=budget, what="it")
    assert not comparison.judgeable
    assert not comparison.within
    assert comparison.load == math.inf


def test_no_number_is_infinitely_wrong() -> None:
    nan = Comparison(error=math.nan, budget=1e-3, what="nan")
    wrong = Comparison(error=1.0, budget=1e-3, what="wrong")
    assert nan.load == math.inf
    assert worst([wrong, nan]) is worst([nan, wrong]) is nan


def test_any_error_exceeds_a_budget_of_zero() -> None:
    assert Comparison(error=1e-30, budget=0.0, what="it").load == math.inf
