"""Cases say what they mean, survive JSON, and refuse nonsense."""

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg_harness import Case, CaseError, Step, builtin_cases, read_cases
from bcg_harness.cases import longest_sequence

steps = st.lists(
    st.builds(
        Step,
        requests=st.dictionaries(st.integers(0, 99), st.integers(1, 4096), max_size=5).map(
            lambda requests: tuple(requests.items())
        ),
        checked=st.booleans(),
    ),
    max_size=5,
)


@given(name=st.text(min_size=1), description=st.text(), steps=steps)
def test_json_round_trip(name: str, description: str, steps: list[Step]) -> None:
    case = Case(name=name, description=description, steps=(*steps, Step(requests=((0, 1),))))
    assert read_cases(json.dumps(case.to_json())) == [case]


def test_a_file_may_hold_several_cases() -> None:
    cases = builtin_cases([16, 64, 256])
    assert read_cases(json.dumps([case.to_json() for case in cases])) == cases


def test_description_and_checked_may_be_left_out() -> None:
    (case,) = read_cases('{"name": "mine", "steps": [{"requests": [[0, 7]]}]}')
    assert case == Case(name="mine", description="", steps=(Step(requests=((0, 7),)),))


def test_a_sequence_grows_from_step_to_step() -> None:
    case = Case(
        name="grows",
        description="",
        steps=(Step(requests=((0, 5), (1, 2))), Step(requests=((0, 4),))),
    )
    assert case.lengths == {0: 9, 1: 2}
    assert case.has_prefix
    assert longest_sequence([case]) == 9


def test_sequences_that_come_once_have_no_prefix() -> None:
    case = Case(
        name="flat", description="", steps=(Step(requests=((0, 5),)), Step(requests=((1, 5),)))
    )
    assert not case.has_prefix


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param("{", "no JSON", id="not-json"),
        pytest.param("7", "expected", id="number"),
        pytest.param('{"name": "a"}', "expected", id="no-steps"),
        pytest.param('{"steps": []}', "strings", id="no-name"),
        pytest.param(
            '{"name": "", "steps": [{"requests": [[0, 1]]}]}', "needs a name", id="empty-name"
        ),
        pytest.param('{"name": "a", "steps": []}', "checks nothing", id="empty"),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, 1]], "checked": false}]}',
            "checks nothing",
            id="set-up-only",
        ),
        pytest.param('{"name": "a", "steps": [[[0, 1]]]}', "expected a step", id="bare-step"),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0]]}]}', "expected a step", id="single"
        ),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, 1.5]]}]}', "expected a step", id="fraction"
        ),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, true]]}]}', "expected a step", id="boolean"
        ),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, 1]], "checked": 1}]}',
            "expected a step",
            id="checked-number",
        ),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, 0]]}]}', "at least one token", id="no-tokens"
        ),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[-1, 3]]}]}',
            "start at 0",
            id="negative-sequence",
        ),
        pytest.param("[]", "no cases in an empty list", id="empty-list"),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, 1]]}], "page": 4}',
            "unknown key 'page'; possible are name, description, steps",
            id="unknown-key",
        ),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, 1]], "check": true}]}',
            "unknown key 'check'; possible are requests, checked",
            id="unknown-key-in-step",
        ),
        pytest.param(
            json.dumps([{"name": "a", "steps": [{"requests": [[0, 1]]}]}] * 2),
            "two cases are called 'a'",
            id="name-twice",
        ),
        pytest.param(
            '{"name": "a", "steps": [{"requests": [[0, 1], [0, 2]]}]}', "twice", id="sequence-twice"
        ),
    ],
)
def test_nonsense_is_refused(raw: str, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        read_cases(raw)


def by_name(buckets: list[int], **kwargs: Any) -> dict[str, Case]:
    return {case.name: case for case in builtin_cases(buckets, **kwargs)}


def tokens(case: Case) -> list[list[int]]:
    return [[count for _, count in step.requests] for step in case.steps]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one-request", [[200]]),
        ("two-requests", [[80, 120]]),
        ("other-boundaries", [[200], [80, 120], [240]]),
        ("bucket-minus-1", [[15], [63], [255]]),
        ("bucket", [[16], [64], [256]]),
        ("bucket-plus-1", [[17], [65], [257]]),
        ("one-token", [[1]]),
        ("one-token-each", [[1] * 64]),
        ("above-largest", [[100, 200]]),
        ("cached-prefixes", [[127, 128], [1000], [50, 40, 60, 70]]),
        ("decode-rows-in-prefill", [[100, 37, 64], [1, 60, 1, 9], [60, 9, 1, 1]]),
        ("page-edges", [[15, 16, 17, 32], [2, 3, 4, 5], [15, 14, 13, 12], [15] * 4, [18]]),
        ("to-the-limit", [*[[256]] * 7, [196], [60]]),
        ("two-chunks", [[127], [73]]),
        ("five-chunks", [[64], [63], [1], [16], [56]]),
        ("large-then-small", [[8] * 32, [100, 50], [90]]),
        ("no-requests", [[], [100]]),
    ],
)
def test_sizes_for_a_bucket_of_256(name: str, expected: list[list[int]]) -> None:
    assert tokens(by_name([16, 64, 256])[name]) == expected


def test_prefixes_of_the_mixed_case() -> None:
    case = by_name([16, 64, 256])["cached-prefixes"]
    assert case.lengths == {0: 50, 1: 127 + 40, 2: 128 + 60, 3: 1000 + 70}
    assert [step.checked for step in case.steps] == [False, False, True]


def checked_spans(case: Case) -> list[list[tuple[int, int]]]:
    """Return the (prefix, total) of each request of each checked step."""
    lengths: Counter[int] = Counter()
    found = []
    for step in case.steps:
        before = lengths.copy()
        lengths.update(dict(step.requests))
        if step.checked:
            found.append([(before[sequence], lengths[sequence]) for sequence, _ in step.requests])
    return found


@pytest.mark.parametrize("buckets", [[8, 32], [16, 64], [16, 64, 256]], ids=str)
def test_every_bucket_is_filled_around_its_edges_by_requests_with_prefixes(
    buckets: list[int],
) -> None:
    steps = checked_spans(by_name(buckets)["all-prefixed-edges"])
    totals = [sum(stop - start for start, stop in step) for step in steps]
    assert totals == [size + offset for size in buckets for offset in (-1, 0, 1)]
    assert all(len(step) == 2 for step in steps)
    assert all(start for step in steps for start, _ in step)


@pytest.mark.parametrize("buckets", [[1], [8, 32], [16, 64, 256], [2048]], ids=str)
def test_many_requests_have_a_prefix_wherever_kernels_change_and_some_have_none(
    buckets: list[int],
) -> None:
    (spans,) = checked_spans(by_name(buckets)["many-prefixes"])
    assert len(spans) == 33
    assert [number for number in (5, 9, 17, 33) if not spans[number - 1][0]] == []
    assert [start for start, _ in spans].count(0) == 8


@pytest.mark.parametrize("buckets", [[1], [8, 32], [16, 64, 256], [2048]], ids=str)
def test_decode_rows_are_first_and_last_beside_longer_requests(buckets: list[int]) -> None:
    steps = checked_spans(by_name(buckets)["decode-rows-in-prefill"])
    decodes = [[stop - start == 1 <= start for start, stop in step] for step in steps]
    assert decodes == [[True, False, True, False], [False, False, True, True]]


PAGES = [1, 2, 3, 16, 48, 256]


@pytest.mark.parametrize("buckets", [[4], [16, 64], [16, 64, 256]], ids=str)
@pytest.mark.parametrize("page", PAGES)
def test_prefixes_end_at_and_beside_page_ends(page: int, buckets: list[int]) -> None:
    first, *_ = checked_spans(by_name(buckets, page_size=page)["page-edges"])
    assert [start for start, _ in first] == [max(1, page - 1), page, page + 1, 2 * page]


@pytest.mark.parametrize("buckets", [[4], [16, 64], [16, 64, 256]], ids=str)
@pytest.mark.parametrize("page", PAGES)
def test_requests_with_a_prefix_end_at_and_beside_page_ends(page: int, buckets: list[int]) -> None:
    _, second, _ = checked_spans(by_name(buckets, page_size=page)["page-edges"])
    assert [stop % page for _, stop in second] == [(page - 1) % page, 0, 1 % page, 0]
    assert all(start and stop - start > 1 for start, stop in second)


@pytest.mark.parametrize("page", PAGES)
def test_new_tokens_span_three_pages(page: int) -> None:
    *_, ((start, stop),) = checked_spans(by_name([16, 64], page_size=page)["page-edges"])
    assert (stop - 1) // page - start // page >= 2


@pytest.mark.parametrize("name", ["page-edges", "to-the-limit"])
@pytest.mark.parametrize("buckets", [[1], [16, 64], [16, 64, 256]], ids=str)
def test_long_prefixes_are_prefilled_in_few_steps(buckets: list[int], name: str) -> None:
    steps = by_name(buckets, page_size=256)[name].steps
    assert sum(not step.checked for step in steps) <= 16
    assert sum(step.checked for step in steps) <= 3


@pytest.mark.parametrize("buckets", [[1], [16, 64, 256], [2048], [4096]], ids=str)
@pytest.mark.parametrize(("context", "reached"), [(2, 2), (300, 300), (2048, 2048), (8192, 2048)])
def test_the_last_position_is_reached_behind_a_prefix(
    buckets: list[int], context: int, reached: int
) -> None:
    ((span,),) = checked_spans(by_name(buckets, max_context=context)["to-the-limit"])
    assert span[0] > 0
    assert span[1] == reached


def test_every_ordered_pair_of_buckets_is_replayed() -> None:
    sizes = [step.num_tokens for step in by_name([16, 64, 256])["bucket-order"].steps]
    pairs = set(pairwise(sizes))
    assert pairs == {(a, b) for a in (14, 56, 224) for b in (14, 56, 224) if a != b}


LADDERS = [[1], [2, 3], [64], [16, 64, 256], [192, 256], [240, 256], list(range(8, 520, 8)), [2048]]


@pytest.mark.parametrize(
    "buckets", LADDERS, ids=lambda buckets: f"{len(buckets)}-up-to-{buckets[-1]}"
)
@pytest.mark.parametrize("page_size", [1, 256])
def test_names_stay_the_same_for_every_ladder_and_page(buckets: list[int], page_size: int) -> None:
    assert list(by_name(buckets, page_size=page_size)) == list(by_name([16, 64, 256]))


@pytest.mark.parametrize(
    "buckets", LADDERS, ids=lambda buckets: f"{len(buckets)}-up-to-{buckets[-1]}"
)
def test_requests_fit_the_context(buckets: list[int]) -> None:
    assert longest_sequence(builtin_cases(buckets, max_context=2048)) <= 2048


@pytest.mark.parametrize("name", ["other-boundaries", "large-then-small"])
@pytest.mark.parametrize("buckets", LADDERS[3:6], ids=str)
def test_small_batches_stay_in_the_bucket_of_the_large_one(buckets: list[int], name: str) -> None:
    steps = by_name(buckets)[name].steps
    assert all(buckets[-2] < step.num_tokens <= buckets[-1] for step in steps)
