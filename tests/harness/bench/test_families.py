"""Names of workloads stand for the same requests everywhere."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg_harness import HarnessError, Step
from bcg_harness.bench.families import (
    CPU_WORKLOADS,
    DEFAULT_WORKLOADS,
    FAMILIES,
    parse_workload,
)
from bcg_harness.bench.lognormal import Lognormal
from bcg_harness.bench.workloads import check_fits

UNPACKED = 2**20


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("single-5000", [((0, 5000),)]),
        ("concurrent-3x64", [((0, 64), (1, 64), (2, 64))]),
        ("concurrent-2x2000", [((0, 2000), (1, 2000))]),
        ("chunked-100x40", [((0, 40),), ((0, 40),), ((0, 20),)]),
    ],
)
def test_numbers_in_a_name_fix_the_batches(
    name: str, steps: list[tuple[tuple[int, int], ...]]
) -> None:
    workload = parse_workload(name, token_budget=16)
    assert workload.name == name
    assert workload.case.steps == tuple(Step(requests=requests) for requests in steps)


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("chat-6", [(0, 496), (0, 362), (0, 147), (0, 94), (0, 185), (0, 142)]),
        ("chat-6x90", [(0, 248), (0, 181), (0, 74), (0, 47), (0, 93), (0, 71)]),
        ("documents-4", [(0, 5080), (0, 4080), (0, 2173), (0, 1590)]),
        ("turns-4", [(2478, 113), (737, 34), (926, 48), (1973, 38)]),
        ("turns-4x128", [(352, 113), (105, 34), (132, 48), (281, 38)]),
    ],
)
def test_mixes_are_the_same_on_every_machine(name: str, requests: list[tuple[int, int]]) -> None:
    (step,) = parse_workload(name, token_budget=UNPACKED).record().steps
    assert list(step) == requests


@pytest.mark.parametrize("family", ["chat", "documents", "turns"])
def test_a_smaller_mix_is_the_beginning_of_a_larger_one(family: str) -> None:
    (few,) = parse_workload(f"{family}-4", token_budget=UNPACKED).record().steps
    (many,) = parse_workload(f"{family}-9", token_budget=UNPACKED).record().steps
    assert many[:4] == few


def test_another_seed_makes_another_mix() -> None:
    assert parse_workload("chat-4", seed=1).case.steps != parse_workload("chat-4").case.steps


@pytest.mark.parametrize("name", ["chat-16", "documents-4", "turns-16"])
def test_mixes_are_packed_within_the_token_budget(name: str) -> None:
    tokens = parse_workload(name, token_budget=512).batch_tokens()
    assert set(tokens[:-1]) == {512}
    assert 1 <= tokens[-1] <= 512


def test_the_description_of_a_mix_names_budget_and_seed() -> None:
    description = parse_workload("chat-16", seed=3, token_budget=512).description
    assert "16 chat prompts" in description
    assert "at most 512 tokens; seed 3" in description


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.form)
def test_the_example_of_a_family_is_one(family) -> None:  # type: ignore[no-untyped-def]
    assert parse_workload(family.example).name == family.example


@pytest.mark.parametrize(
    "name",
    ["", "single", "single-0", "single-007", "single-1x2", "chat-", "chat-4x", "Chat-4", "chat-٣"],
)
def test_an_unknown_name_is_refused_with_an_example_of_each_family(name: str) -> None:
    with pytest.raises(HarnessError) as caught:
        parse_workload(name)
    message = str(caught.value)
    assert repr(name) in message
    lines = message.splitlines()[1:-1]
    assert [family.example in line for family, line in zip(FAMILIES, lines, strict=True)] == [
        True
    ] * len(FAMILIES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("single-9999999", "at most 1048576"),
        ("concurrent-64x99999", "more than 1048576 tokens"),
        ("chat-9999999", "more than 1048576 tokens"),
    ],
)
def test_more_tokens_than_make_sense_are_refused(name: str, message: str) -> None:
    with pytest.raises(HarnessError, match=f"{name}.*{message}"):
        parse_workload(name)


def test_a_budget_below_one_is_refused_with_the_workload() -> None:
    with pytest.raises(HarnessError, match=r"'chat-4': a batch of at most 0 tokens"):
        parse_workload("chat-4", token_budget=0)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(HarnessError, match="seed is -1, expected at least 0"):
        parse_workload("chat-4", seed=-1)


@pytest.mark.parametrize("name", DEFAULT_WORKLOADS)
def test_default_workloads_fit_a_context_of_8192_tokens(name: str) -> None:
    check_fits(parse_workload(name), 8192)


@pytest.mark.parametrize("name", CPU_WORKLOADS)
@given(seed=st.integers(0, 2**64))
def test_workloads_for_a_cpu_fit_a_context_of_2048_tokens_with_any_seed(
    name: str, seed: int
) -> None:
    check_fits(parse_workload(name, seed=seed), 2048)


def test_half_of_lognormal_lengths_are_above_the_median_and_none_beyond_the_ends() -> None:
    lengths, random = Lognormal(median=100, sigma=1.0, least=50, most=300), Random(0)
    drawn = [lengths.draw(random) for _ in range(4000)]
    assert (min(drawn), max(drawn)) == (50, 300)
    # Six standard deviations of a fair coin that is thrown 4000 times.
    assert abs(sum(length > 100 for length in drawn) - 2000) < 190


def test_lognormal_lengths_stretch_with_their_ends() -> None:
    lengths = Lognormal(median=100, sigma=1.0, least=50, most=300)
    assert lengths.around(1) == Lognormal(median=1, sigma=1.0, least=1, most=3)


def test_a_lognormal_length_without_spread_is_exact() -> None:
    assert {Lognormal.exactly(8191).draw(Random(seed)) for seed in range(20)} == {8191}
