"""Tokens are the same in every case, and different for every sequence."""

import pytest

from bcg_harness import HarnessError, RandomTokens, TextTokens, TokenSource


@pytest.fixture(params=["random", "text"])
def source(request: pytest.FixtureRequest) -> TokenSource:
    return RandomTokens(1000) if request.param == "random" else TextTokens(list(range(700)))


def test_a_short_request_is_the_start_of_a_long_one(source: TokenSource) -> None:
    assert source.tokens(3, 2000)[:17] == source.tokens(3, 17)


def test_sequences_differ(source: TokenSource) -> None:
    drawn = {tuple(source.tokens(sequence, 20)) for sequence in range(64)}
    assert len(drawn) == 64


def test_random_tokens_are_in_the_vocabulary() -> None:
    assert set(RandomTokens(7).tokens(0, 500)) == set(range(7))


def test_the_largest_seed_is_taken() -> None:
    assert len(RandomTokens(1000, seed=2**63 - 1).tokens(7, 20)) == 20


def test_another_seed_gives_other_tokens() -> None:
    assert RandomTokens(1000, seed=1).tokens(0, 20) != RandomTokens(1000, seed=2).tokens(0, 20)


def test_a_text_is_repeated_as_needed() -> None:
    assert TextTokens([1, 2, 3]).tokens(0, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(HarnessError, match="no tokens"):
        TextTokens([])
