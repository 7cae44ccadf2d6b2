"""Bucket ladders: which sizes there are, which of them serves a batch, and what is refused."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bcg_core import Admission, BucketError, TokenBuckets

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LADDERS: dict[str, list[int]] = {
    "one": [8],
    "single_token": [1],
    "dense": [1, 2, 3, 4],
    "sparse": [1, 16],
    "ladder": list(TokenBuckets.ladder(32, min_tokens=4, sizes_per_octave=2)),
    "odd": [3, 7, 20],
}

EVERY_COUNT = [
    pytest.param(sizes, tokens, id=f"{name}-{tokens}")
    for name, sizes in LADDERS.items()
    for tokens in range(sizes[-1] + 2)
]


@pytest.mark.parametrize(("sizes", "tokens"), EVERY_COUNT)
def test_the_smallest_bucket_that_holds_the_tokens_is_selected(
    sizes: list[int], tokens: int
) -> None:
    large_enough = [size for size in sizes if size >= tokens]
    expected = min(large_enough) if large_enough else None
    assert TokenBuckets(sizes).select(tokens).bucket == expected


@pytest.mark.parametrize(("sizes", "tokens"), EVERY_COUNT)
def test_a_reason_is_given_exactly_without_a_bucket(sizes: list[int], tokens: int) -> None:
    expected = f"more tokens than the largest bucket ({sizes[-1]})" if tokens > sizes[-1] else None
    assert TokenBuckets(sizes).select(tokens).reason == expected


def test_a_selection_is_the_table_it_should_be() -> None:
    selected = [TokenBuckets([2, 5]).select(tokens).bucket for tokens in range(7)]
    assert selected == [2, 2, 2, 5, 5, 5, None]


def test_an_admission_is_to_a_bucket_or_to_eager() -> None:
    assert Admission.replay(8) == Admission(bucket=8, reason=None)
    assert Admission.eager("why") == Admission(bucket=None, reason="why")


# A ladder as a sequence


def test_buckets_are_a_sequence_of_their_sizes() -> None:
    buckets = TokenBuckets([4, 8, 16])
    assert list(buckets) == [4, 8, 16]
    assert (len(buckets), buckets[0], buckets[-1], buckets[1:]) == (3, 4, 16, (8, 16))
    assert 8 in buckets
    assert 9 not in buckets


def test_buckets_show_their_sizes() -> None:
    assert repr(TokenBuckets([4, 8])) == "TokenBuckets([4, 8])"


def test_sizes_may_come_from_an_iterator() -> None:
    assert list(TokenBuckets(iter([4, 8]))) == [4, 8]


# What is refused


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "needs at least one size"),
        ([0, 8], "bucket 0 is no positive number of tokens"),
        ([8, -4], "bucket -4 is no positive number of tokens"),
        ([8, 16.0], "bucket 16.0 is no positive number of tokens"),
        ([True, 8], "bucket True is no positive number of tokens"),
        (["8"], "bucket '8' is no positive number of tokens"),
        ([8, None], "bucket None is no positive number of tokens"),
        ([16, 8], r"bucket 8 stands after 16: give sizes in ascending order.*\[8, 16\]"),
        ([4, 16, 8, 8], r"bucket 8 stands after 16: .*\[4, 8, 16\]"),
        ([8, 8], r"bucket 8 is there twice: .*each once, for example \[8\]"),
    ],
    ids=[
        "empty",
        "zero",
        "negative",
        "fraction",
        "boolean",
        "text",
        "none",
        "descending",
        "unsorted",
        "duplicate",
    ],
)
def test_a_ladder_that_makes_no_sense_is_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(BucketError, match=message):
        TokenBuckets(sizes)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 8, "min_tokens": 0},
        {"max_tokens": 8, "sizes_per_octave": 0},
    ],
    ids=lambda arguments: "-".join(f"{name}={value}" for name, value in arguments.items()),
)
def test_a_default_ladder_needs_positive_numbers(arguments: dict[str, int]) -> None:
    with pytest.raises(BucketError, match="a ladder needs positive numbers, got max_tokens="):
        TokenBuckets.ladder(**arguments)


def test_a_bucket_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="at least one size"):
        TokenBuckets([])


# The default ladder


def test_the_default_ladder_of_256_tokens() -> None:
    expected = [*range(8, 129, 8), *range(144, 257, 16)]
    assert list(TokenBuckets.ladder(256)) == expected


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(1, [1]), (7, [7]), (8, [8]), (9, [8, 9]), (17, [8, 16, 17])]
)
def test_a_default_ladder_shorter_than_a_step(max_tokens: int, expected: list[int]) -> None:
    assert list(TokenBuckets.ladder(max_tokens)) == expected


ladders = {
    "max_tokens": st.integers(1, 20_000),
    "min_tokens": st.integers(1, 64),
    "sizes_per_octave": st.integers(1, 16),
}


@UNHURRIED
@given(**ladders)
def test_a_default_ladder_ends_at_the_most_tokens(
    max_tokens: int, min_tokens: int, sizes_per_octave: int
) -> None:
    ladder = TokenBuckets.ladder(
        max_tokens, min_tokens=min_tokens, sizes_per_octave=sizes_per_octave
    )
    assert ladder[-1] == max_tokens


@UNHURRIED
@given(**ladders, share=st.floats(0, 1))
def test_padding_in_a_default_ladder_is_bounded(
    max_tokens: int, min_tokens: int, sizes_per_octave: int, share: float
) -> None:
    ladder = TokenBuckets.ladder(
        max_tokens, min_tokens=min_tokens, sizes_per_octave=sizes_per_octave
    )
    tokens = max(1, round(share * max_tokens))
    bucket = ladder.select(tokens).bucket
    assert bucket is not None
    bound = max(tokens / sizes_per_octave, min_tokens)
    assert 0 <= bucket - tokens < bound


@UNHURRIED
@given(**ladders)
def test_a_default_ladder_is_short(max_tokens: int, min_tokens: int, sizes_per_octave: int) -> None:
    ladder = TokenBuckets.ladder(
        max_tokens, min_tokens=min_tokens, sizes_per_octave=sizes_per_octave
    )
    octaves = max(max_tokens // min_tokens, 1).bit_length()
    assert len(ladder) <= sizes_per_octave * (octaves + 1) + 1


@UNHURRIED
@given(**ladders)
def test_steps_of_a_default_ladder_never_shrink_but_the_last(
    max_tokens: int, min_tokens: int, sizes_per_octave: int
) -> None:
    ladder = list(
        TokenBuckets.ladder(max_tokens, min_tokens=min_tokens, sizes_per_octave=sizes_per_octave)
    )
    steps = [after - before for before, after in itertools.pairwise(ladder)][:-1]
    assert steps == sorted(steps)


# Ladders in files


def test_a_saved_ladder_is_loaded_again(tmp_path: Path) -> None:
    TokenBuckets([16, 64]).save(tmp_path / "ladder.json")
    assert list(TokenBuckets.load(tmp_path / "ladder.json")) == [16, 64]


def test_a_path_may_be_text(tmp_path: Path) -> None:
    TokenBuckets([16]).save(str(tmp_path / "ladder.json"))
    assert list(TokenBuckets.load(str(tmp_path / "ladder.json"))) == [16]


def test_a_saved_ladder_is_plain_json(tmp_path: Path) -> None:
    TokenBuckets([16, 64]).save(tmp_path / "ladder.json")
    assert json.loads((tmp_path / "ladder.json").read_text()) == {"buckets": [16, 64]}


def test_a_file_may_say_where_its_ladder_comes_from(tmp_path: Path) -> None:
    TokenBuckets([16, 64]).save(tmp_path / "ladder.json", about={"made_by": "hand"})
    raw = json.loads((tmp_path / "ladder.json").read_text())
    assert raw == {"buckets": [16, 64], "about": {"made_by": "hand"}}
    assert list(TokenBuckets.load(tmp_path / "ladder.json")) == [16, 64]


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    TokenBuckets(range(1, 100)).save(tmp_path / "ladder.json")
    TokenBuckets([16]).save(tmp_path / "ladder.json")
    assert list(TokenBuckets.load(tmp_path / "ladder.json")) == [16]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"", "is no JSON", id="empty"),
        pytest.param(b"16,64", "is no JSON", id="numbers"),
        pytest.param(b"\xff", "is no JSON", id="no-text"),
        pytest.param(b"[" * 200_000, "is no JSON", id="deep"),
        pytest.param(b"[16, 64]", "holds no ladder", id="list"),
        pytest.param(b"{}", "holds no ladder", id="no-buckets"),
        pytest.param(b'{"buckets": 16}', "holds no ladder", id="one-number"),
        pytest.param(b'{"buckets": {"16": 64}}', "holds no ladder", id="object"),
        pytest.param(b'{"buckets": []}', "needs at least one size", id="no-sizes"),
        pytest.param(b'{"buckets": [64, 16]}', "bucket 16 stands after 64", id="descending"),
        pytest.param(b'{"buckets": ["16"]}', "bucket '16' is no positive number", id="words"),
    ],
)
def test_a_file_without_a_ladder_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "ladder.json").write_bytes(text)
    with pytest.raises(BucketError, match=rf"ladder\.json.* {message}"):
        TokenBuckets.load(tmp_path / "ladder.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BucketError, match=r"cannot read .*nowhere\.json: No such file"):
        TokenBuckets.load(tmp_path / "nowhere.json")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BucketError, match=r"cannot write .*ladder\.json: No such file"):
        TokenBuckets([16]).save(tmp_path / "nowhere" / "ladder.json")
