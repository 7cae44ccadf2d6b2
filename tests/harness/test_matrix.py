"""The correctness matrix: every registered backend, on every tiny model, in every case."""

from typing import Any

import pytest
import torch

from bcg_core import AttentionBackend, TokenBuckets, UnsupportedSpecError
from bcg_harness import (
    Candidate,
    Case,
    CheckResult,
    Matrix,
    Outcome,
    RandomTokens,
    Step,
    builtin_cases,
)
from bcg_harness.testing import MaskBackend, NoFloat32, NoPrefix, NotInstalled, Variants
from bcg_llama import PRESETS, LlamaModel, random_llama

BUCKETS = TokenBuckets([16, 64])
# Far positions cost time, and are reached in the tests of the command.
CASES = builtin_cases(BUCKETS, max_context=512)
MASK = Candidate(name="mask", backend=MaskBackend)
TINY = [name for name in PRESETS if name.startswith("tiny")]


def matrix_of(model: LlamaModel) -> Matrix:
    return Matrix(model, CASES, BUCKETS, RandomTokens(model.spec.vocab_size))


def assert_passes(matrix: Matrix, candidate: Candidate, case: Case) -> None:
    try:
        probe = matrix.use(candidate.backend, **candidate.options)
    except UnsupportedSpecError as error:
        pytest.skip(str(error))
    results = matrix.check_case(candidate.label, probe, case)
    assert results
    skips = {result.detail for result in results if result.outcome is Outcome.SKIPPED}
    if skips:
        pytest.skip("; ".join(skips))
    assert [result for result in results if result.outcome is not Outcome.PASSED] == []


@pytest.fixture(scope="module", params=TINY)
def float32_matrix(request: pytest.FixtureRequest, bcg_device: torch.device) -> Matrix:
    return matrix_of(random_llama(PRESETS[request.param], device=bcg_device))


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def half_matrix(request: pytest.FixtureRequest, bcg_device: torch.device) -> Matrix:
    return matrix_of(random_llama(PRESETS["tiny"], device=bcg_device, dtype=request.param))


@pytest.fixture(scope="module")
def small_matrix(small_model: LlamaModel) -> Matrix:
    return matrix_of(small_model)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_is_right_in_float32(
    float32_matrix: Matrix, bcg_backend: Candidate, case: Case
) -> None:
    assert_passes(float32_matrix, bcg_backend, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_is_right_in_16_bit(
    half_matrix: Matrix, bcg_backend: Candidate, case: Case
) -> None:
    assert_passes(half_matrix, bcg_backend, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bucket_metadata_and_out_writes_are_right(small_matrix: Matrix, case: Case) -> None:
    assert_passes(small_matrix, MASK, case)


@pytest.mark.parametrize(
    ("backend", "declared"),
    [(NoFloat32, True), (NotInstalled, False)],
    ids=["limit", "not-installed"],
)
def test_a_backend_that_cannot_be_made_is_a_skip_that_says_whether_it_declares_that(
    small_matrix: Matrix, backend: type[AttentionBackend], declared: bool
) -> None:
    found = small_matrix.try_to_use("mine", backend)
    assert isinstance(found, CheckResult)
    assert (found.outcome, found.backend, found.declared) == (Outcome.SKIPPED, "mine", declared)
    assert "attention backend" not in found.detail


def test_a_backend_that_raises_when_made_is_an_error(small_matrix: Matrix) -> None:
    class Unmade(MaskBackend):
        def __init__(self, *args: object) -> None:
            raise MemoryError("no workspace")

    found = small_matrix.try_to_use("mine", Unmade)
    assert isinstance(found, CheckResult)
    assert found.outcome is Outcome.ERROR
    assert small_matrix.notes.get("mine") is None


def test_a_case_that_the_backend_does_not_serve_is_a_declared_skip(small_matrix: Matrix) -> None:
    case = next(case for case in CASES if case.name == "two-chunks")
    (found,) = small_matrix.check_case("mine", small_matrix.use(NoPrefix), case)
    assert (found.outcome, found.declared) == (Outcome.SKIPPED, True)


def test_a_case_that_is_too_long_for_the_model_is_no_declared_skip(
    small_matrix: Matrix, small_model: LlamaModel
) -> None:
    step = Step(requests=((0, small_model.spec.max_positions + 1),))
    case = Case(name="long", description="", steps=(step,))
    (found,) = small_matrix.check_case("mine", small_matrix.use(MaskBackend), case)
    assert (found.outcome, found.declared) == (Outcome.SKIPPED, False)


def test_one_capture_serves_all_backends(small_matrix: Matrix) -> None:
    small_matrix.use(MaskBackend)
    before = small_matrix.capture_report

    class Another(MaskBackend):
        name = "another"

    assert_passes(small_matrix, Candidate(name="another", backend=Another), CASES[0])
    assert small_matrix.capture_report is before


def test_variants_of_one_backend_are_made_apart(small_matrix: Matrix) -> None:
    one, two = (small_matrix.use(Variants, version=version) for version in (1, 2))
    assert (one.name, two.name) == ("no-prefix", "mask")
    assert small_matrix.use(Variants, version=1) is one


def first_alone(place: str) -> type[MaskBackend]:
    """Return a class whose instances but the first raise in the method called ``place``."""
    made: list[AttentionBackend] = []

    class FirstAlone(MaskBackend):
        name = "first-alone"

        def __init__(self, *args: Any) -> None:
            made.append(self)
            super().__init__(*args)

    right = getattr(FirstAlone, place)

    def raising(self: FirstAlone, *args: Any) -> Any:
        result = right(self, *args)
        if self is not made[0]:
            raise SystemExit("one is enough")
        return result

    setattr(FirstAlone, place, raising)
    return FirstAlone


@pytest.mark.parametrize("place", ["__init__", "warm_up", "init_forward_metadata"])
def test_companions_that_raise_fail_in_the_checks_that_need_them_alone(
    small_matrix: Matrix, place: str
) -> None:
    probe = small_matrix.use(first_alone(place))
    case = next(case for case in CASES if case.name == "two-chunks")
    results = small_matrix.check_case("mine", probe, case)
    bad = [result for result in results if result.outcome is not Outcome.PASSED]
    assert {result.outcome for result in bad} == {Outcome.FAILED}
    assert {result.check for result in bad} == {"interleaved", "full_graph"}
    assert [result for result in bad if "SystemExit: one is enough" not in result.detail] == []
    assert {"bit_equal", "oracle"} <= {result.check for result in results}
