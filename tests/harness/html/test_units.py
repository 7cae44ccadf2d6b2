"""Numbers as people read them."""

import pytest

from bcg_harness.html.units import duration, listed, percent, ratio, short_tokens, size, whole


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (1.234e-6, "1.23 µs"),
        (12.34e-6, "12.3 µs"),
        (123.4e-6, "123 µs"),
        (999.9e-6, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (1234.0, "1,234 s"),
    ],
)
def test_durations_have_three_digits_and_a_fitting_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, "–"), (0, "0.00 MiB"), (2**20, "1.00 MiB"), (3 * 2**29, "1.50 GiB")],
)
def test_sizes(count: int | None, words: str) -> None:
    assert size(count) == words


@pytest.mark.parametrize(("count", "words"), [(16, "16"), (1000, "1000"), (2048, "2k")])
def test_token_counts_of_axes(count: int, words: str) -> None:
    assert short_tokens(count) == words


@pytest.mark.parametrize(
    ("words", "phrase"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)  # fmt: skip
def test_lists_are_phrases(words: list[str], phrase: str) -> None:
    assert listed(words) == phrase


def test_ratios_lose_a_digit_from_ten_on() -> None:
    assert (ratio(2.314), ratio(12.34)) == ("2.31×", "12.3×")


def test_fractions_are_percentages() -> None:
    assert percent(0.1234) == "12.3 %"


def test_large_numbers_have_their_thousands_apart() -> None:
    assert (whole(1234567.8), whole(None)) == ("1,234,568", "–")
