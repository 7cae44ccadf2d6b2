"""Runs of random compositions: right backends pass, faults are found, and what is reported fails again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bcg_backends.sdpa import SDPABackend
from bcg_core import AttentionBackend, Capabilities, PrefillBatch, PrefillRunner, TokenBuckets
from bcg_harness import (
    CHECK_NAMES,
    Case,
    Matrix,
    NoProgress,
    Outcome,
    RandomTokens,
    Step,
)
from bcg_harness.checks import MECHANISM
from bcg_harness.errors import DeviceLostError
from bcg_harness.fuzz import fuzz as fuzz_module
from bcg_harness.fuzz.draw import Bounds
from bcg_harness.fuzz.fuzz import Fuzz
from bcg_harness.testing import (
    AlignsTopLeft,
    ForgetsPaddedOutput,
    ForgetsPrefixFromFifthOn,
    ForgetsPrefixFromSeventeenthOn,
    ForgetsPrefixOfDecodeRows,
    FreezesMetadata,
    FreezesSlots,
    HonestlyNoisy,
    IgnoresLengths,
    MaskBackend,
    NoFloat32,
    NoPrefix,
    Raises,
    WritesCache,
    WritesRowR,
)
from bcg_llama import LlamaModel

MakeFuzz = Callable[..., Fuzz]


def test_right_backends_pass_every_check(make_fuzz: MakeFuzz) -> None:
    tally = make_fuzz(SDPABackend, MaskBackend, cases=12, checks=CHECK_NAMES).run()
    assert tally.passed == {"sdpa": 12, "mask": 12}
    assert set(tally.outcomes) == {Outcome.PASSED}
    assert tally.finished == 12
    assert tally.steps > 24


def test_a_backend_that_is_honestly_noisy_passes(make_fuzz: MakeFuzz) -> None:
    assert make_fuzz(HonestlyNoisy, cases=10).run().passed == {"honestly-noisy": 10}


FAULTS: dict[str, tuple[type[AttentionBackend], tuple[str, ...], str]] = {
    "lengths": (IgnoresLengths, ("attention",), "attention"),
    "top-left": (AlignsTopLeft, ("attention",), "attention"),
    "frozen": (FreezesMetadata, ("bit_equal",), "bit_equal"),
    "row-r": (WritesRowR, ("padding",), "padding"),
    "cache": (WritesCache, ("kv_isolation",), "kv_isolation"),
    "raises": (Raises, ("structure",), "error"),
}


@pytest.mark.parametrize(("backend", "checks", "found_by"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_backend_is_found_and_its_case_shrunk(
    make_fuzz: MakeFuzz, backend: type[AttentionBackend], checks: tuple[str, ...], found_by: str
) -> None:
    (found,) = make_fuzz(backend, checks=checks).run().counterexamples
    assert found.reproduced
    assert found_by in found.checks
    assert sum(step.num_tokens for step in found.case.steps) <= 2
    assert {result.case for result in found.results} == {found.drawn.name}


@pytest.mark.parametrize(
    ("runner_type", "found_by"),
    [(FreezesSlots, "bit_equal"), (ForgetsPaddedOutput, "padding")],
)
def test_a_faulty_runner_is_found(
    make_fuzz: MakeFuzz, runner_type: type[PrefillRunner], found_by: str
) -> None:
    (found,) = (
        make_fuzz(SDPABackend, runner_type=runner_type, most_attempts=0).run().counterexamples
    )
    assert found_by in found.checks


def test_what_a_case_leaves_behind_is_found_in_the_next_and_joined(make_fuzz: MakeFuzz) -> None:
    bounds = Bounds(most_bucket=16, most_buckets=1, most_steps=1)
    (found,) = make_fuzz(FreezesMetadata, bounds=bounds).run().counterexamples
    assert found.reproduced
    assert len(found.drawn.steps) == 1
    assert len(found.case.steps) == 2


class FailsOnce(MaskBackend):
    """Raise once in the life of the process, after some batches."""

    name: ClassVar[str] = "fails-once"
    batches: ClassVar[Counter[str]] = Counter()

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        self.batches["all"] += 1
        if batch.sequences and self.batches["all"] > 30:
            self.batches["all"] = -(10**9)
            raise RuntimeError("once")
        return super().init_forward_metadata(batch)


def test_what_does_not_fail_again_is_kept_as_it_was_drawn(make_fuzz: MakeFuzz) -> None:
    (found,) = make_fuzz(FailsOnce).run().counterexamples
    assert not found.reproduced
    assert found.case == found.drawn
    assert "once" in found.results[0].detail


def test_a_run_stops_at_the_first_failure(make_fuzz: MakeFuzz) -> None:
    tally = make_fuzz(Raises, most_attempts=0).run()
    assert len(tally.counterexamples) == 1
    assert tally.finished < 40


def test_a_run_collects_as_many_failures_as_asked_for(make_fuzz: MakeFuzz) -> None:
    tally = make_fuzz(Raises, most_failures=3, most_attempts=0).run()
    assert len({found.drawn.name for found in tally.counterexamples}) == 3


def test_a_faulty_backend_hides_no_other(make_fuzz: MakeFuzz) -> None:
    tally = make_fuzz(Raises, MaskBackend, cases=6, most_failures=99, most_attempts=0).run()
    assert tally.passed["mask"] == 6
    assert tally.finished == 6


class CannotBeMade(MaskBackend):
    name: ClassVar[str] = "cannot-be-made"

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("no workspace")


def test_a_backend_that_cannot_be_made_is_one_error_and_no_counterexample(
    make_fuzz: MakeFuzz,
) -> None:
    tally = make_fuzz(CannotBeMade, MaskBackend, cases=4).run()
    assert [result.backend for result in tally.errors] == ["cannot-be-made"]
    assert tally.counterexamples == []
    assert tally.passed == {"mask": 4}


@pytest.mark.parametrize(
    ("backend", "reason"), [(NoFloat32, "dtypes: takes bfloat16"), (NoPrefix, "cached_prefix: ")]
)
def test_a_declared_limit_is_a_counted_skip(
    make_fuzz: MakeFuzz, backend: type[AttentionBackend], reason: str
) -> None:
    tally = make_fuzz(backend, cases=10).run()
    ((label, detail),) = tally.skipped
    assert label == backend.name
    assert reason in detail
    assert tally.counterexamples == []


def test_a_lost_gpu_ends_the_run_and_keeps_the_case(
    make_fuzz: MakeFuzz, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(device: torch.device, last: str) -> None:
        raise DeviceLostError(f"lost after {last}")

    monkeypatch.setattr(fuzz_module, "require_device", lost)
    tally = make_fuzz(Raises, most_attempts=0).run()
    (found,) = tally.counterexamples
    assert tally.lost == f"lost after case {found.drawn.name} with raises"
    assert not found.reproduced


def test_backends_take_turns_on_one_capture(make_fuzz: MakeFuzz) -> None:
    order: list[str] = []

    class First(MaskBackend):
        name: ClassVar[str] = "first"

        def init_bucket_metadata(self, bucket: int) -> Tensor:
            order.append(f"made by {self.name}")
            return super().init_bucket_metadata(bucket)

        def update_bucket_metadata(self, metadata: Tensor | None, batch: PrefillBatch) -> Tensor:
            order.append(self.name)
            return super().update_bucket_metadata(metadata, batch)

    class Second(First):
        name: ClassVar[str] = "second"
        capabilities: ClassVar[Capabilities] = replace(MaskBackend.capabilities)

    bounds = Bounds(most_bucket=8, most_buckets=1, most_steps=1)
    make_fuzz(First, Second, cases=3, bounds=bounds).run()
    turns = set(pairwise(order))
    assert ("first", "second") in turns
    assert ("second", "first") in turns
    assert Counter(order)["made by first"] == Counter(order)["made by second"] == 1


@pytest.mark.parametrize(
    ("backend", "checks", "expected"),
    [
        (MaskBackend, MECHANISM, {"capturing", "warming up mask", "mask"}),
        (
            MaskBackend,
            ("oracle",),
            {"computing references", "capturing", "warming up mask", "mask"},
        ),
        (
            HonestlyNoisy,
            MECHANISM,
            {
                "computing references",
                "capturing",
                "warming up honestly-noisy",
                "honestly-noisy",
            },
        ),
    ],
    ids=["mechanism", "oracle", "noisy"],
)
def test_only_what_is_asked_for_is_checked_and_references_only_where_needed(
    small_model: LlamaModel,
    backend: type[AttentionBackend],
    checks: tuple[str, ...],
    expected: set[str],
) -> None:
    phases: set[str] = set()

    class Log(NoProgress):
        def start(self, what: str, total: int) -> None:
            phases.add(what)

    case = Case(name="made", description="", steps=(Step(requests=((0, 3),)),))
    source = RandomTokens(small_model.spec.vocab_size)
    matrix = Matrix(small_model, [case], TokenBuckets([4]), source, checks=checks, progress=Log())
    results = matrix.check(backend.name, backend)
    assert {result.check for result in results} == set(checks)
    assert phases == expected


@pytest.mark.parametrize(
    "backend",
    [ForgetsPrefixFromFifthOn, ForgetsPrefixFromSeventeenthOn, ForgetsPrefixOfDecodeRows],
    ids=lambda backend: backend.name,
)
def test_what_is_wrong_behind_some_prefixes_only_is_drawn(
    make_fuzz: MakeFuzz, backend: type[AttentionBackend]
) -> None:
    tally = make_fuzz(backend, cases=300, checks=["attention"], most_attempts=1).run()
    assert [found.checks for found in tally.counterexamples] == [["attention"]]
