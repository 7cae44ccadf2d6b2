"""Distributions of batches: what is read, and what is refused."""

from pathlib import Path

import pytest

from bcg_harness import HarnessError
from bcg_harness.tune.distribution import TokenDistribution, read_lengths


def test_equal_batches_are_added_up_in_order() -> None:
    distribution = TokenDistribution.of([(30, 1.0), (10, 2.0), (30, 0.5)])
    assert distribution.tokens_n.tolist() == [10, 30]
    assert distribution.weights_n.tolist() == [2.0, 1.5]
    assert distribution.batches == 3


def test_a_distribution_is_summarised() -> None:
    distribution = TokenDistribution.of([(10, 3.0), (30, 1.0)])
    assert (distribution.largest, distribution.weight, distribution.mean) == (30, 4.0, 15.0)


@pytest.mark.parametrize(
    ("text", "batches"),
    [
        pytest.param("300\n20\n", [(300, 1.0), (20, 1.0)], id="lengths"),
        pytest.param("300 2.5\n20 1\n", [(300, 2.5), (20, 1.0)], id="weights"),
        pytest.param("300,2.5\n20, 1\n", [(300, 2.5), (20, 1.0)], id="commas"),
        pytest.param("300\t2\r\n20\r\n", [(300, 2.0), (20, 1.0)], id="tabs"),
        pytest.param("\n300\n\n  \n20 3", [(300, 1.0), (20, 3.0)], id="empty-lines"),
        pytest.param("1048576", [(2**20, 1.0)], id="most"),
    ],
)
def test_lengths_are_read(tmp_path: Path, text: str, batches: list[tuple[int, float]]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    assert read_lengths(file) == batches


@pytest.mark.parametrize(
    "line",
    [
        *("many", "1.5", "0", "-3", "1048577", "9" * 5000, '{"prompt_tokens": 3}'),
        *("10 x", "10 0", "10 -1", "10 nan", "10 inf", "10 1e13", "10 1 1"),
        *("3_00", "10 1_0", "\u0663\u0660\u0660"),
    ],
    ids=lambda line: line[:10],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(f"300\n\n{line}\n20\n")
    with pytest.raises(HarnessError, match=r"lengths\.txt, line 3: found .*expected tokens"):
        read_lengths(file)


@pytest.mark.parametrize("text", ["", "\n \n"], ids=["nothing", "blank"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(HarnessError, match=r"lengths\.txt holds no lengths"):
        read_lengths(file)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(HarnessError, match=r"cannot read nowhere\.txt"):
        read_lengths(Path("nowhere.txt"))
