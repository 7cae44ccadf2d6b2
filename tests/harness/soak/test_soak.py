"""A soak is green for what is right, and names what grows or goes wrong for what is not."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
from torch import Tensor

from bcg_backends.sdpa import SDPABackend
from bcg_core import Admission, AttentionBackend, PrefillBatch, PrefillRunner, TokenBuckets
from bcg_harness import Case, HarnessError, Matrix, Outcome, RandomTokens
from bcg_harness.checks import MECHANISM
from bcg_harness.environment import Environment
from bcg_harness.soak.quantity import QUANTITIES
from bcg_harness.soak.record import SoakReport
from bcg_harness.soak.soak import Soak
from bcg_harness.testing import (
    AllocatesAtReplay,
    GivesNaN,
    HonestlyNoisy,
    KeepsBatches,
    KeepsDeviceMemory,
    KeepsFiles,
    KeepsHostMemory,
    KeepsMappedMemory,
    KeepsNumbers,
    KeepsObjects,
    KeepsResults,
    MaskBackend,
    NoPrefix,
    Raises,
    ReadsOnHost,
    TiresOfReplay,
    WearsOut,
)
from bcg_llama import LlamaModel

MakeSoak = Callable[..., Soak]


def grown(soak: Soak) -> set[str]:
    """Return the names of all quantities that grew by more than is allowed; there must be some that did not."""
    growths = soak.samples.growths()
    assert any(each.within for each in growths)
    return {each.quantity.name for each in growths if not each.within}


@pytest.fixture(scope="module")
def right(make_soak: MakeSoak) -> Soak:
    """Return a soak of two right backends that has run."""
    soak = make_soak(SDPABackend, MaskBackend)
    soak.run()
    return soak


def test_right_backends_serve_what_was_asked_for_and_pass_all_checks(right: Soak) -> None:
    tally = right.tally
    assert (tally.failure, tally.unusable) == (None, [])
    assert tally.replays >= 200
    assert tally.replays == tally.buckets.total() == right.runner.stats.replays.total()
    # Three extreme batches with each backend, before and after.
    assert min(tally.checked["sdpa"], tally.checked["mask"]) > 6


def test_right_backends_leave_nothing_behind(right: Soak) -> None:
    assert grown(right) == set()
    assert right.samples.taken == 20


def test_all_buckets_are_used_and_fallbacks_are_counted(right: Soak) -> None:
    assert set(right.tally.buckets) == {4, 8}
    assert right.runner.stats.fallbacks["more tokens than the largest bucket (8)"] > 10


def test_pages_come_back(right: Soak) -> None:
    assert right.tally.sequences > 100
    cache = right.runner.kv_cache
    # Of the extreme batches, the last of all, nobody is left; page 0 and a bystander's are never free.
    assert cache.free_pages == cache.num_pages - 2


def test_backends_take_turns_at_random(right: Soak) -> None:
    turns = right.tally.turns
    assert set(turns) == {"sdpa", "mask"}
    assert min(turns.values()) > 0.4 * turns.total()


def test_what_needs_a_gpu_is_named(right: Soak) -> None:
    assert set(right.missing.values()) == {"no GPU is used"}
    assert "pinned host memory" in right.missing
    named = {*right.missing, *(each.quantity.name for each in right.samples.growths())}
    assert named == {each.name for each in QUANTITIES}


@pytest.mark.parametrize(
    ("checked", "green"),
    [({"sdpa": 1, "mask": 1}, True), ({"sdpa": 0, "mask": 0}, False), ({"sdpa": 1}, False)],
    ids=["of-all", "of-none", "of-one"],
)
def test_a_run_is_green_only_if_batches_of_every_backend_were_checked(
    right: Soak, small_model: LlamaModel, checked: dict[str, int], green: bool
) -> None:
    report = SoakReport(
        environment=Environment.of(small_model.spec.device),
        spec=small_model.spec,
        settings={},
        buckets=(4, 8),
        tally=replace(right.tally, checked=Counter(checked)),
        fallbacks={},
        samples=right.samples,
        missing=right.missing,
        planned=200,
        seconds=1.0,
        interrupted=False,
    )
    assert report.is_green is green


LEAKS: dict[str, tuple[type[AttentionBackend], str]] = {
    "tensors": (KeepsBatches, "tensors that Python holds"),
    "workspaces": (KeepsDeviceMemory, "host memory that malloc gave out"),
    "objects": (KeepsObjects, "objects that Python can collect"),
    "numbers": (KeepsNumbers, "memory blocks of Python"),
    "pages": (KeepsMappedMemory, "resident host memory"),
    "heap": (KeepsHostMemory, "host memory that malloc gave out"),
    "files": (KeepsFiles, "open files"),
}


@pytest.mark.parametrize(("backend", "quantity"), LEAKS.values(), ids=LEAKS)
def test_a_leaking_backend_is_found_by_what_it_leaks(
    make_soak: MakeSoak, backend: type[AttentionBackend], quantity: str
) -> None:
    soak = make_soak(backend, check_every=1000)
    assert soak.run().failure is None
    assert quantity in grown(soak)


def test_one_leaking_backend_of_two_is_found(make_soak: MakeSoak) -> None:
    soak = make_soak(MaskBackend, KeepsBatches)
    soak.run()
    assert "tensors that Python holds" in grown(soak)


def test_a_leaking_runner_is_found(make_soak: MakeSoak) -> None:
    soak = make_soak(MaskBackend, runner_type=KeepsResults)
    soak.run()
    assert {"tensors that Python holds", "objects that Python can collect"} <= grown(soak)
    assert soak.tally.grown["bcg_core.results.PrefillResult"] > 100


@pytest.mark.parametrize(
    "backend", [AllocatesAtReplay, ReadsOnHost, HonestlyNoisy], ids=lambda each: each.name
)
def test_what_is_let_go_again_is_no_growth(
    make_soak: MakeSoak, backend: type[AttentionBackend]
) -> None:
    soak = make_soak(backend)
    assert soak.run().failure is None
    assert grown(soak) == set()


def test_a_result_that_goes_wrong_late_is_found(make_soak: MakeSoak) -> None:
    soak = make_soak(WearsOut, check_every=5)
    failure = soak.run().failure
    assert failure is not None
    assert failure.replays >= 100
    assert {result.check for result in failure.results} == {"bit_equal"}


def test_a_failure_keeps_the_batches_since_the_cache_was_empty(make_soak: MakeSoak) -> None:
    failure = make_soak(GivesNaN).run().failure
    assert failure is not None
    assert failure.results[0].check == "bit_equal"
    case = Case.from_json(failure.to_json()["case"])
    # It failed in the first batch that was checked: the longest prefixes, which others had made.
    assert Counter(len(step.requests) for step in case.steps) == {1: len(case.steps) - 1, 3: 1}


class RaisesAboveBuckets(MaskBackend):
    """Raise at the second of the extreme batches: sequences have ended before, and their numbers have come again."""

    name: ClassVar[str] = "raises-above-buckets"

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Refuse the longest contexts in more tokens than the largest bucket."""
        if batch.num_tokens > 8 and max(batch.kv_lens) == 24:
            raise RuntimeError("too long")
        return super().init_forward_metadata(batch)


def test_the_case_of_a_failure_fails_at_its_end_when_it_is_run_again(
    make_soak: MakeSoak, small_model: LlamaModel
) -> None:
    failure = make_soak(RaisesAboveBuckets).run().failure
    assert failure is not None
    source = RandomTokens(small_model.spec.vocab_size)
    buckets = TokenBuckets((4, 8))
    matrix = Matrix(small_model, [failure.case], buckets, source, checks=MECHANISM, page_size=4)
    results = matrix.check("again", RaisesAboveBuckets)
    bad = [(result.step, result.detail) for result in results if result.outcome.is_bad]
    assert len(bad) == 1
    assert bad[0][0] == len(failure.case.steps) - 1
    assert "too long" in bad[0][1]


def test_what_is_raised_is_an_error_of_the_batch(make_soak: MakeSoak) -> None:
    failure = make_soak(Raises).run().failure
    assert failure is not None
    (result,) = failure.results
    assert result.outcome is Outcome.ERROR
    assert "one request at a time" in result.detail


def test_replays_that_do_not_happen_are_found_between_checks(make_soak: MakeSoak) -> None:
    failure = make_soak(MaskBackend, runner_type=TiresOfReplay, check_every=1000).run().failure
    assert failure is not None
    assert failure.results[0].detail.startswith("the runner counted other replays than were due")
    # With batches of the round that came before, and not of the pause that follows.
    assert max(len(step.requests) for step in failure.case.steps) > 1


class SkipsOne(PrefillRunner):
    """Run one batch eagerly, behind ``after`` replays."""

    def __init__(self, *args: Any, after: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._after = after
        self._skipped = False

    def admit(self, batch: PrefillBatch) -> Admission:
        """Admit it to no bucket."""
        if self._skipped or self.stats.replays.total() < self._after:
            return super().admit(batch)
        self._skipped = True
        return Admission.eager("once")


def test_a_replay_that_is_missing_at_the_very_end_is_found(make_soak: MakeSoak) -> None:
    make = partial(make_soak, MaskBackend, replays=20, samples=10, check_every=1000)
    whole = make()
    whole.run()
    before_the_end = whole.samples.to_json()["replays"][-1]
    failure = make(runner_type=partial(SkipsOne, after=before_the_end)).run().failure
    assert failure is not None
    assert failure.results[0].detail.startswith("the runner counted other replays than were due")


def test_a_backend_without_prefixes_is_skipped_with_the_reason(make_soak: MakeSoak) -> None:
    (skipped,) = make_soak(NoPrefix).run().unusable
    assert skipped.outcome is Outcome.SKIPPED
    assert "cached_prefix" in skipped.detail


@pytest.mark.parametrize("samples", [9, 201], ids=["few", "many"])
def test_readings_that_say_nothing_are_refused(make_soak: MakeSoak, samples: int) -> None:
    with pytest.raises(HarnessError, match="take 10 to 200"):
        make_soak(MaskBackend, replays=1000, samples=samples)


def test_more_readings_than_replays_are_refused(make_soak: MakeSoak) -> None:
    with pytest.raises(HarnessError, match="at most one a replay"):
        make_soak(MaskBackend, replays=15)
