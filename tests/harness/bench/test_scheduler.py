"""The scheduler serves every token once and in order, and keeps its budgets."""

import math
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg_harness import HarnessError, Step
from bcg_harness.bench.scheduler import Request, pack

requests_in_order = st.lists(
    st.builds(
        Request,
        prompt_tokens=st.integers(1, 50),
        prefix_tokens=st.integers(0, 30),
        arrival_seconds=st.floats(0, 0.1),
    ),
    min_size=1,
    max_size=20,
).map(lambda requests: sorted(requests, key=lambda request: request.arrival_seconds))
token_budgets = st.integers(1, 60)
most_requests = st.integers(1, 8)
waits = st.floats(0, 0.05)


def timed(steps: tuple[Step, ...]) -> list[list[tuple[int, int]]]:
    return [list(step.requests) for step in steps if step.checked]


def prompts(*tokens: int, every: float = 0.0) -> list[Request]:
    return [
        Request(prompt_tokens=count, arrival_seconds=i * every) for i, count in enumerate(tokens)
    ]


@given(requests=requests_in_order, budget=token_budgets, most=most_requests, wait=waits)
def test_every_token_is_served_exactly_once(
    requests: list[Request], budget: int, most: int, wait: float
) -> None:
    served: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for step in pack(requests, token_budget=budget, max_requests=most, max_wait=wait):
        for sequence, tokens in step.requests:
            served[sequence, step.checked] += tokens
    new = {(i, True): request.prompt_tokens for i, request in enumerate(requests)}
    cached = {(i, False): r.prefix_tokens for i, r in enumerate(requests) if r.prefix_tokens}
    assert served == new | cached


@given(requests=requests_in_order, budget=token_budgets, most=most_requests, wait=waits)
def test_batches_are_neither_empty_nor_above_their_budgets(
    requests: list[Request], budget: int, most: int, wait: float
) -> None:
    steps = pack(requests, token_budget=budget, max_requests=most, max_wait=wait)
    assert all(1 <= len(step.requests) <= most and step.num_tokens <= budget for step in steps)


@given(requests=requests_in_order, budget=token_budgets, most=most_requests, wait=waits)
def test_requests_are_served_in_order_of_arrival(
    requests: list[Request], budget: int, most: int, wait: float
) -> None:
    steps = pack(requests, token_budget=budget, max_requests=most, max_wait=wait)
    order = [sequence for batch in timed(steps) for sequence, _ in batch]
    assert order == sorted(order)


@given(requests=requests_in_order, budget=token_budgets, most=most_requests, wait=waits)
def test_prefixes_are_prepared_before_anything_is_timed(
    requests: list[Request], budget: int, most: int, wait: float
) -> None:
    checked = [
        step.checked
        for step in pack(requests, token_budget=budget, max_requests=most, max_wait=wait)
    ]
    assert checked == sorted(checked)


@given(requests=requests_in_order, budget=token_budgets, most=most_requests, wait=waits)
def test_no_request_waits_longer_than_allowed_for_a_later_one(
    requests: list[Request], budget: int, most: int, wait: float
) -> None:
    steps = pack(requests, token_budget=budget, max_requests=most, max_wait=wait)
    waited = [
        requests[batch[-1][0]].arrival_seconds - requests[batch[0][0]].arrival_seconds
        for batch in timed(steps)
    ]
    assert max(waited) <= wait


@given(requests=requests_in_order, budget=token_budgets, most=most_requests, wait=waits)
def test_a_batch_ends_only_for_a_reason(
    requests: list[Request], budget: int, most: int, wait: float
) -> None:
    batches = timed(pack(requests, token_budget=budget, max_requests=most, max_wait=wait))
    closed = [
        sum(tokens for _, tokens in batch) == budget
        or len(batch) == most
        or requests[following[0][0]].arrival_seconds - requests[batch[0][0]].arrival_seconds > wait
        for batch, following in pairwise(batches)
    ]
    assert all(closed)


def test_a_prompt_that_does_not_fit_fills_the_batch_and_goes_on_in_the_next() -> None:
    steps = pack(prompts(60, 250, 30), token_budget=100, max_requests=8)
    assert timed(steps) == [[(0, 60), (1, 40)], [(1, 100)], [(1, 100)], [(1, 10), (2, 30)]]


def test_a_batch_holds_at_most_as_many_requests_as_allowed() -> None:
    steps = pack(prompts(1, 1, 1, 1, 1), token_budget=100, max_requests=2)
    assert timed(steps) == [[(0, 1), (1, 1)], [(2, 1), (3, 1)], [(4, 1)]]


def test_the_wait_counts_from_the_first_request_of_a_batch() -> None:
    steps = pack(prompts(1, 1, 1, 1, every=0.25), token_budget=100, max_requests=8, max_wait=0.5)
    assert timed(steps) == [[(0, 1), (1, 1), (2, 1)], [(3, 1)]]


def test_prefixes_are_prepared_in_batches_within_the_budget() -> None:
    requests = [Request(prompt_tokens=5, prefix_tokens=tokens) for tokens in (70, 0, 80)]
    steps = pack(requests, token_budget=100, max_requests=8)
    assert steps == (
        Step(requests=((0, 70), (2, 30)), checked=False),
        Step(requests=((2, 50),), checked=False),
        Step(requests=((0, 5), (1, 5), (2, 5))),
    )


def test_the_arrival_of_requests_does_not_delay_the_preparation_of_their_prefixes() -> None:
    requests = [Request(prompt_tokens=1, prefix_tokens=1, arrival_seconds=at) for at in (0.0, 9.0)]
    steps = pack(requests, token_budget=100, max_requests=8)
    assert [len(step.requests) for step in steps] == [2, 1, 1]


def test_prefixes_of_a_stretch_are_prepared_before_it() -> None:
    requests = [
        Request(prompt_tokens=10, prefix_tokens=50, arrival_seconds=float(second))
        for second in range(4)
    ]
    steps = pack(requests, token_budget=100, max_requests=8, stretch_tokens=120)
    assert [(step.checked, step.requests) for step in steps] == [
        (False, ((0, 50), (1, 50))),
        (True, ((0, 10),)),
        (True, ((1, 10),)),
        (False, ((2, 50), (3, 50))),
        (True, ((2, 10),)),
        (True, ((3, 10),)),
    ]


@given(
    requests=requests_in_order,
    budget=token_budgets,
    most=most_requests,
    stretch=st.integers(1, 200),
)
def test_stretches_prepare_each_prefix_before_its_prompt_and_serve_the_same_batches(
    requests: list[Request], budget: int, most: int, stretch: int
) -> None:
    whole = pack(requests, token_budget=budget, max_requests=most)
    steps = pack(requests, token_budget=budget, max_requests=most, stretch_tokens=stretch)
    assert timed(steps) == timed(whole)
    prepared = dict.fromkeys(range(len(requests)), 0)
    for step in steps:
        for sequence, tokens in step.requests:
            if step.checked:
                assert prepared[sequence] == requests[sequence].prefix_tokens
            else:
                prepared[sequence] += tokens


def test_no_requests_make_no_batches() -> None:
    assert pack([], token_budget=1, max_requests=1) == ()


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        pytest.param({"token_budget": 0}, "at most 0 tokens", id="tokens"),
        pytest.param({"max_requests": 0}, "0 requests", id="requests"),
        pytest.param({"max_wait": -1.0}, "max_wait is -1", id="wait"),
        pytest.param({"max_wait": math.nan}, "max_wait is nan", id="nan"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(budgets: dict[str, float], message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        pack(prompts(1), **{"token_budget": 16, "max_requests": 1, **budgets})  # type: ignore[arg-type]


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(HarnessError, match="sort them by arrival_seconds"):
        pack(prompts(1, 1, every=1.0)[::-1], token_budget=16, max_requests=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"prompt_tokens": 0}, "prompt_tokens is 0, expected at least 1", id="empty"),
        pytest.param({"prefix_tokens": -1}, "prefix_tokens is -1", id="negative-prefix"),
        pytest.param({"prompt_tokens": 2**20, "prefix_tokens": 1}, "1048576", id="too-long"),
        pytest.param({"output_tokens": -1}, "output_tokens is -1", id="negative-output"),
        pytest.param({"output_tokens": 2**21}, "output_tokens is 2097152", id="endless-output"),
        pytest.param({"arrival_seconds": -0.5}, "arrival_seconds is -0.5", id="before-start"),
        pytest.param({"arrival_seconds": math.nan}, "arrival_seconds is nan", id="nan"),
        pytest.param({"arrival_seconds": math.inf}, "arrival_seconds is inf", id="infinite"),
        pytest.param({"arrival_seconds": 10**400}, "a finite number", id="no-float"),
    ],
)
def test_requests_that_make_no_sense_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(HarnessError, match=message):
        Request(**{"prompt_tokens": 1, **values})
