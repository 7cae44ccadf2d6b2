"""What a soak serves: within bounds, the same for a seed, with sequences that begin and end."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcg_harness.fuzz.draw import Bounds
from bcg_harness.soak.traffic import Traffic, Visit

traffics = st.builds(
    Traffic,
    seed=st.integers(0, 2**63),
    buckets=st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(sorted),
    bounds=st.builds(Bounds, most_requests=st.integers(1, 9), most_context=st.integers(2, 100)),
)
PLAIN = Traffic(seed=3, buckets=(4, 16), bounds=Bounds(most_context=40))


def served(visits: list[Visit]) -> tuple[int, int, int]:
    """Return the longest context, the most requests of a batch and the most sequences alive in ``visits``."""
    alive: Counter[int] = Counter()
    longest = most_requests = most_alive = 0
    for visit in visits:
        for sequence, tokens in visit.step.requests:
            alive[sequence] += tokens
        longest = max([longest, *alive.values()])
        most_requests = max(most_requests, len(visit.step.requests))
        most_alive = max(most_alive, len(alive))
        for sequence in visit.ended:
            del alive[sequence]
    return longest, most_requests, most_alive


@given(traffic=traffics)
def test_what_is_drawn_fits_into_what_the_cache_is_made_for(traffic: Traffic) -> None:
    (everything,) = traffic.largest.steps
    for visits in (islice(traffic.round(0), 60), traffic.extremes(), traffic.pulse):
        longest, requests, alive = served(list(visits))
        assert longest <= max(tokens for _, tokens in everything.requests)
        assert max(requests, alive) <= len(everything.requests)


@given(traffic=traffics)
def test_extremes_and_pulses_leave_nobody_alive(traffic: Traffic) -> None:
    for visits in (list(traffic.extremes()), traffic.pulse):
        came = {sequence for visit in visits for sequence, _ in visit.step.requests}
        last: dict[int, bool] = {}
        for visit in visits:
            last |= {sequence: False for sequence, _ in visit.step.requests}
            last |= dict.fromkeys(visit.ended, True)
        assert last == dict.fromkeys(came, True)


def test_a_round_is_the_same_in_every_run() -> None:
    assert list(islice(PLAIN.round(7), 50)) == list(islice(PLAIN.round(7), 50))
    assert list(islice(PLAIN.round(7), 50)) != list(islice(PLAIN.round(8), 50))


def test_a_sequence_never_comes_again_after_its_end() -> None:
    ended: set[int] = set()
    for visit in islice(PLAIN.round(0), 300):
        assert ended.isdisjoint(sequence for sequence, _ in visit.step.requests)
        ended.update(visit.ended)
    assert len(ended) > 100


@pytest.fixture(scope="module")
def kinds() -> Counter[str]:
    """Count what 300 batches hold."""
    lengths: Counter[int] = Counter()
    found: Counter[str] = Counter()
    for visit in islice(PLAIN.round(0), 300):
        numbers = [sequence for sequence, _ in visit.step.requests]
        new = [sequence for sequence in numbers if not lengths[sequence]]
        found["new"] += bool(new)
        found["cached"] += len(new) < len(numbers)
        found["mixed"] += 0 < len(new) < len(numbers)
        found["above all buckets"] += visit.step.num_tokens > PLAIN.buckets[-1]
        found["at an edge"] += visit.step.num_tokens in PLAIN.buckets
        lengths.update(dict(visit.step.requests))
    return found


@pytest.mark.parametrize("kind", ["new", "cached", "mixed", "above all buckets", "at an edge"])
def test_every_kind_of_batch_is_served(kinds: Counter[str], kind: str) -> None:
    assert kinds[kind] >= 15


def test_the_extremes_are_at_least_as_large_as_anything_drawn() -> None:
    largest = max(visit.step.num_tokens for visit in PLAIN.extremes())
    drawn = max(visit.step.num_tokens for visit in islice(PLAIN.round(0), 500))
    assert drawn <= largest


def test_the_model_bounds_the_contexts() -> None:
    assert Traffic.of(0, (8, 64), 100).bounds.most_context == 100
    assert Traffic.of(0, (8, 64), 4096).bounds.most_context == 128
