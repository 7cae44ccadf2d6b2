"""What repeated measurements say."""

from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg_harness.bench.spread import Speedup, Spread, Verdict
from bcg_harness.errors import HarnessError
from bcg_harness.typed_json import from_json, to_json

TIMES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50)


def spread(q1: float, median: float, q3: float) -> Spread:
    return Spread(samples=9, median=median, p90=q3, q1=q1, q3=q3)


def test_a_single_sample_is_all_there_is() -> None:
    assert Spread.of([2.0]) == Spread(samples=1, median=2.0, p90=2.0, q1=2.0, q3=2.0)


def test_percentiles_interpolate_between_samples() -> None:
    found = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.q1, found.median, found.q3) == (2.0, 3.0, 4.0)
    assert found.p90 == pytest.approx(4.6)
    assert found.iqr == 2.0


@given(TIMES)
def test_percentiles_are_in_order_and_within_the_samples(samples: list[float]) -> None:
    found = Spread.of(samples)
    tiny = 1e-9 * max(samples)
    values = [min(samples), found.q1, found.median, found.q3, found.p90, max(samples)]
    assert all(one <= other + tiny for one, other in pairwise(values))


@pytest.mark.parametrize("seconds", [0.0, -1.0, nan, inf], ids=str)
def test_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(HarnessError, match="no positive times"):
        spread(1.0, seconds, 3.0)


@given(TIMES)
def test_json_holds_all_of_it(samples: list[float]) -> None:
    found = Spread.of(samples)
    assert from_json(Spread, to_json(found)) == found


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        (spread(1, 2, 3), Verdict.FASTER),
        (spread(1, 2, 4), Verdict.TOO_CLOSE),
        (spread(4, 5, 6), Verdict.TOO_CLOSE),
        (spread(6, 7, 8), Verdict.TOO_CLOSE),
        (spread(7, 8, 9), Verdict.SLOWER),
    ],
    ids=["below", "touches below", "inside", "touches above", "above"],
)
def test_the_verdict_needs_quartiles_apart(mine: Spread, verdict: Verdict) -> None:
    assert Speedup.over(spread(4, 5, 6), mine).verdict is verdict


def test_the_ratio_is_that_of_medians() -> None:
    assert Speedup.over(spread(4, 6, 7), spread(1, 2, 3)).ratio == 3.0
