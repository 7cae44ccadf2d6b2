"""How far a result may be from another: budgets derived from the data at hand, never tuned by hand.

Shape letters: R rows (tokens) of one request, S rows of a longer one, X everything else of a row.

An independent low-precision computation of the same quantity shows what rounding alone does to this data. Twice its
error, plus one rounding step for data on which it happens to be exact, is the budget. Errors are relative L2 norms.

One rounding step is half the spacing of numbers just above 1, ``finfo(dtype).eps / 2``: the largest relative error of
rounding once.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bcg_harness.wrong_rows import NotFinite, place

MOST_BUDGET = 0.5
"""A budget beyond this judges nothing: results of which half is wrong would pass."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Measure how far some rows are from what they should be.

    Attributes:
        whole: relative L2 error of all rows together: finds what is a little wrong everywhere.
        row: that of the worst row: there a single wrong row of a long request cannot hide.
        worst_row: which row that is; None when nobody measured it.
        not_finite: which rows of the result are not finite; None for none.
    """

    whole: float
    row: float
    worst_row: int | None = None
    not_finite: NotFinite | None = None

    @classmethod
    def between(cls, actual_RX: Tensor, expected_RX: Tensor) -> "Errors":
        """Compare two tensors, in float64; infinite for other shapes and for what is not finite."""
        if actual_RX.shape != expected_RX.shape:
            return cls(whole=math.inf, row=math.inf)
        errors = RowErrors.between(actual_RX, expected_RX).errors()
        if math.isfinite(errors.whole):
            return errors
        return replace(errors, not_finite=NotFinite.of(actual_RX))


@dataclass(frozen=True, kw_only=True, eq=False)
class RowErrors:
    """Hold squared errors and squared norms of S rows, float64, from which errors of any stretch of them follow."""

    errors_S: Tensor
    norms_S: Tensor

    @classmethod
    def between(cls, actual_SX: Tensor, expected_SX: Tensor) -> "RowErrors":
        """Compare two tensors of one shape, row by row."""
        expected = expected_SX.double().flatten(1)
        difference = actual_SX.double().flatten(1) - expected
        return cls(errors_S=difference.square().sum(1), norms_S=expected.square().sum(1))

    def errors(self) -> Errors:
        """Return the errors of all rows."""
        whole = _ratio(self.errors_S.sum(), self.norms_S.sum())
        row, worst_row = _ratio(self.errors_S, self.norms_S).max(0)
        # One transfer from the device, not three.
        found: list[float] = torch.stack([whole.sqrt(), row.sqrt(), worst_row.double()]).tolist()
        return Errors(whole=found[0], row=found[1], worst_row=int(found[2]))

    def worst_stretch(self, rows: int) -> float:
        """Return the largest relative L2 error of any ``rows`` neighbouring rows; 0 when there are fewer."""
        if rows > len(self.errors_S):
            return 0.0
        errors, norms = (_moving_sum(squares, rows) for squares in (self.errors_S, self.norms_S))
        return _ratio(errors, norms).max().sqrt().item()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hold a measured error beside what it may be.

    Attributes:
        error: relative L2; infinite when something is not finite.
        budget: the most it may be.
        what: what was compared.
        worst: the row that is farthest off, in words; empty when ``what`` names it, or nothing is known of rows.
        not_finite: which rows are not finite, in words; empty for none.
    """

    error: float
    budget: float
    what: str
    worst: str = ""
    not_finite: str = ""

    @property
    def judgeable(self) -> bool:
        """Tell whether the budget can tell right from wrong: a number, and at most ``MOST_BUDGET``."""
        return self.budget <= MOST_BUDGET

    @property
    def within(self) -> bool:
        """Tell whether the budget can judge, and the error is finite and within it."""
        return self.judgeable and self.error <= self.budget

    @property
    def load(self) -> float:
        """Return the error as a fraction of the budget; infinite for no number, and where the budget cannot judge."""
        if not self.judgeable or not math.isfinite(self.error):
            return math.inf
        if self.error == 0:
            return 0.0
        return self.error / self.budget if self.budget > 0 else math.inf


def compare(
    actual_RX: Tensor,
    expected_RX: Tensor,
    *,
    low: Errors,
    what: str,
    position: int | None = None,
) -> Comparison:
    """Compare rows, and return the worse of two comparisons: all of them together, and the worst one.

    Args:
        actual_RX: the result to judge; its dtype gives the rounding step.
        expected_RX: what it should be.
        low: what errors an independent low-precision computation makes.
        what: names the rows in the result.
        position: of the first row in its sequence, if it has one.
    """
    found = Errors.between(actual_RX, expected_RX)
    return judge(
        [Measured(found=found, low=low, dtype=actual_RX.dtype, what=what, position=position)]
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Hold errors that were measured, and are still to be judged.

    Attributes:
        found: errors of the result.
        low: errors of an independent low-precision computation of the same rows.
        dtype: the result's, which gives the rounding step.
        what: names the rows.
        position: of the first row in its sequence, if it has one.
    """

    found: Errors
    low: Errors
    dtype: torch.dtype
    what: str
    position: int | None = None

    @property
    def worst(self) -> str:
        """Return the row that is farthest off, in words; empty when it is not known."""
        row = self.found.worst_row
        return "" if row is None else place(row, self.position)

    @property
    def not_finite(self) -> str:
        """Return which rows are not finite, in words; empty for none."""
        found = self.found.not_finite
        return "" if found is None else found.describe(self.position)


def judge(measured: Sequence[Measured]) -> Comparison:
    """Return the worst of ``measured``, each held to the largest low-precision errors found among all of them.

    On a few rows the low-precision computation may be right by luck; over all rows that belong together it shows what
    rounding can do. Where it is not finite it shows nothing: behind a layer that returned NaN everything is NaN.
    """
    whole, row = (
        max(filter(math.isfinite, (getattr(one.low, name) for one in measured)), default=math.inf)
        for name in ("whole", "row")
    )
    comparisons = []
    for one in measured:
        step = torch.finfo(one.dtype).eps / 2
        comparisons += [
            Comparison(
                error=one.found.whole,
                budget=2 * whole + step,
                what=one.what,
                worst=one.worst,
                not_finite=one.not_finite,
            ),
            Comparison(
                error=one.found.row,
                budget=2 * row + step,
                what=f"{one.what}, worst {one.worst or 'row'}",
            ),
        ]
    return worst(comparisons)


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """Return the comparison that uses most of its budget; of several that are infinitely wrong, the first."""
    return max(comparisons, key=lambda comparison: comparison.load)


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Tell whether both hold the same bits; unlike ``==`` this tells zeros of different sign apart."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element as an integer, where NaN equals itself."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.contiguous().view(integers)


def _ratio(errors: Tensor, norms: Tensor) -> Tensor:
    """Divide; no error is none whatever the norm, and what is not finite is infinitely wrong."""
    ratio = torch.where(errors == 0, torch.zeros_like(errors), errors / norms)
    return torch.where(ratio.isfinite(), ratio, torch.full_like(ratio, math.inf))


def _moving_sum(values_S: Tensor, length: int) -> Tensor:
    sums = torch.cat([values_S.new_zeros(1), values_S.cumsum(0)])
    return (sums[length:] - sums[:-length]).clamp(min=0)
