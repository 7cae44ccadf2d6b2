"""Negotiation of a page size: every backend takes it, and reads it in place."""

from dataclasses import replace

import pytest

from bcg_core import Capabilities, negotiate_page_size

ANY = Capabilities()


@pytest.mark.parametrize(
    ("multiples", "preferred", "size"),
    [
        pytest.param([], [], 16, id="no-backend"),
        pytest.param([1], [1], 16, id="any-size"),
        pytest.param([1, 1, 1], [1, 128, 256], 256, id="the-strictest-serves-all"),
        pytest.param([16, 48], [1, 1], 48, id="least-common-multiple"),
        pytest.param([1, 24], [64, 1], 192, id="takes-and-reads-in-place"),
        pytest.param([5], [1], 20, id="at-least-16"),
    ],
)
def test_page_size(multiples: list[int], preferred: list[int], size: int) -> None:
    records = [
        replace(ANY, page_multiple=takes, preferred_page_multiple=reads)
        for takes, reads in zip(multiples, preferred, strict=True)
    ]
    assert negotiate_page_size(records) == size


def test_a_larger_least_size_is_kept() -> None:
    assert negotiate_page_size([ANY], least=100) == 100
