"""Workloads say what is timed, on what lengths, and when first tokens come."""

import pytest

from bcg_harness import Case, HarnessError, Step
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.bench.workloads import Workload, check_fits

PREFIXED = Workload(
    case=Case(
        name="prefixed",
        description="two requests, one with a prefix and in two chunks",
        steps=(
            Step(requests=((0, 100),), checked=False),
            Step(requests=((0, 20), (1, 12))),
            Step(requests=((1, 7),)),
        ),
    )
)


def flat(*batches: tuple[int, ...], arrivals: dict[int, float]) -> Workload:
    steps = tuple(Step(requests=tuple((sequence, 8) for sequence in batch)) for batch in batches)
    return Workload(case=Case(name="flat", description="", steps=steps), arrivals=arrivals)


def test_only_checked_steps_are_timed() -> None:
    assert PREFIXED.timed_steps == PREFIXED.case.steps[1:]
    assert PREFIXED.requests_per_step == (2, 1)
    assert PREFIXED.batch_tokens() == (32, 7)


def test_lengths_include_cached_tokens() -> None:
    assert PREFIXED.lengths == {0: 120, 1: 19}
    assert PREFIXED.longest == 120
    assert PREFIXED.kv_pages(16) == 10


def test_most_requests_of_a_batch_count_those_that_only_prepare() -> None:
    steps = (
        Step(requests=((0, 1), (1, 1), (2, 1)), checked=False),
        Step(requests=((0, 1), (1, 1))),
    )
    assert Workload(case=Case(name="a", description="", steps=steps)).max_requests == 3


def test_the_record_holds_prefix_and_new_tokens_of_each_timed_request() -> None:
    assert PREFIXED.record() == WorkloadRecord(
        name="prefixed",
        description="two requests, one with a prefix and in two chunks",
        steps=(((100, 20), (0, 12)), ((12, 7),)),
    )


def test_the_first_token_comes_with_the_last_chunk() -> None:
    assert PREFIXED.time_to_first_token([0.5, 0.25]) == {0: 0.5, 1: 0.75}


def test_a_batch_waits_for_the_last_of_its_requests() -> None:
    workload = flat((0, 1), arrivals={0: 1.0, 1: 3.0})
    assert workload.time_to_first_token([0.5]) == {0: 2.5, 1: 0.5}


def test_a_batch_waits_for_the_one_before_it() -> None:
    workload = flat((0,), (1,), arrivals={0: 1.0, 1: 1.25})
    assert workload.time_to_first_token([2.0, 0.5]) == {0: 2.0, 1: 2.25}


def test_sequences_without_arrival_are_there_from_the_start() -> None:
    workload = flat((0, 1), arrivals={1: 2.0})
    assert workload.time_to_first_token([0.5]) == {0: 2.5, 1: 0.5}


def test_a_timed_batch_without_requests_takes_its_time() -> None:
    workload = flat((), (0,), arrivals={})
    assert workload.time_to_first_token([0.5, 0.25]) == {0: 0.75}


def test_latencies_have_to_be_as_many_as_timed_batches() -> None:
    with pytest.raises(ValueError, match="zip"):
        PREFIXED.time_to_first_token([0.5])


def test_a_workload_as_long_as_the_context_fits() -> None:
    check_fits(PREFIXED, 120)


def test_a_workload_longer_than_the_context_is_refused_with_its_longest_request() -> None:
    with pytest.raises(
        HarnessError, match=r"'prefixed' has a request of 120 tokens.*request 0.*ends at 119"
    ):
        check_fits(PREFIXED, 119)


def traffic(*leaves: float, stretch_tokens: int | None = 8) -> Workload:
    """Return requests of 8 tokens, one a second, which hold their pages until ``leaves``; each is a stretch."""
    steps = tuple(Step(requests=((sequence, 8),)) for sequence in range(len(leaves)))
    return Workload(
        case=Case(name="traffic", description="", steps=steps),
        arrivals={sequence: float(sequence) for sequence in range(len(leaves))},
        leaves=dict(enumerate(leaves)),
        stretch_tokens=stretch_tokens,
    )


def test_a_workload_is_in_one_piece_unless_it_says_otherwise() -> None:
    assert [stretch.steps for stretch in PREFIXED.stretches] == [PREFIXED.case.steps]
    assert traffic(9.0, 9.0, stretch_tokens=None).kv_pages(4) == 4


def test_pages_of_requests_that_have_ended_come_back_before_the_next_stretch() -> None:
    workload = traffic(0.5, 1.5, 2.5, 3.5)
    assert [stretch.ended for stretch in workload.stretches] == [(), (0,), (1,), (2,)]


def test_a_request_that_still_decodes_holds_its_pages() -> None:
    workload = traffic(2.5, 1.5, 2.5, 3.5)
    assert [stretch.ended for stretch in workload.stretches] == [(), (), (1,), (0, 2)]


@pytest.mark.parametrize(
    ("leaves", "pages"),
    [((0.0,) * 100, 2), ((1e9,) * 100, 200), ([n + 2.5 for n in range(100)], 6)],
    ids=["all-end-at-once", "none-ends", "three-at-once"],
)
def test_a_workload_takes_the_pages_of_requests_that_are_there_at_once(
    leaves: tuple[float, ...], pages: int
) -> None:
    assert traffic(*leaves).kv_pages(4) == pages
