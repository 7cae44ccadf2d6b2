"""Every fault that the checks exist for is found, and by the check that is there for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from bcg_core import AttentionBackend, PrefillModel, PrefillRunner, TokenBuckets
from bcg_harness import (
    CHECK_NAMES,
    Case,
    CheckResult,
    Matrix,
    Outcome,
    RandomTokens,
    Step,
    builtin_cases,
)
from bcg_harness.testing import (
    AlignsTopLeft,
    AllocatesAtReplay,
    AssumesContiguousPages,
    AttendsInSegment,
    CachesByShape,
    CapsLength,
    ChangesQueries,
    DividesByRequests,
    DropsFullLastPage,
    ErrsInCompany,
    FallsBackSilently,
    ForgetsPaddedInputs,
    ForgetsPaddedOutput,
    FreezesBoundaries,
    FreezesMetadata,
    FreezesPythonNumber,
    FreezesSlots,
    GivesNaN,
    HonestlyNoisy,
    IgnoresLengths,
    IgnoresOut,
    IgnoresPrefix,
    InterleavesHeads,
    KeepsOneTable,
    KeepsPythonState,
    KeepsStaleRows,
    LeavesOutUnwritten,
    LeavesSideChannel,
    LosesLastRow,
    MaskBackend,
    Noisy,
    PlansForNobody,
    PlansForPaddedCount,
    PretendsToReplay,
    Raises,
    ReadsOnHost,
    ReplacesWeights,
    ReturnsOffsetView,
    ReturnsOtherDevice,
    ReturnsOtherDtype,
    ReturnsPaddedRows,
    ReturnsStrided,
    ReturnsTransposed,
    RunsOnAnotherStream,
    RunsPythonAgain,
    SamplesWrongRow,
    ScalesTooMuch,
    SharesPlans,
    SkipsBreak,
    SkipsFullBucket,
    SplitsByComposition,
    TrustsUnwrittenSlots,
    WritesCache,
    WritesLate,
    WritesNaNBehindRows,
    WritesRowR,
    ZeroesPageTable,
)
from bcg_llama import PRESETS, LlamaModel, random_llama

BUCKETS = TokenBuckets([8, 32])
CASES = [
    case
    for case in builtin_cases(BUCKETS)
    if case.name in ("one-request", "cached-prefixes", "five-chunks", "large-then-small")
]


def case_of(name: str, *steps: list[tuple[int, int]]) -> Case:
    return Case(
        name=name,
        description="",
        steps=tuple(Step(requests=tuple(requests)) for requests in steps),
    )


FULL_SMALL = case_of("full-small", [(0, 8)])
FULL_LARGE = case_of("full-large", [(0, 20), (1, 12)])
OTHER_PREFIX = case_of("other-prefix", [(0, 5)], [(1, 5)], [(0, 5)])
TWO_BUCKETS = case_of("two-buckets", [(0, 20)], [(1, 5)])
NOBODY = case_of("nobody", [])
FULL_PAGES = case_of("full-pages", [(0, 32)])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Name who is at fault, which checks must find it, and which must not be disturbed by it."""

    found_by: set[str]
    spares: set[str]
    backend: type[AttentionBackend] = MaskBackend
    model: Callable[[PrefillModel], PrefillModel] = lambda model: model
    runner: type[PrefillRunner] = PrefillRunner
    cases: Sequence[Case] = field(default_factory=lambda: CASES)


MECHANISM = {"structure", "kv_isolation", "padding"}
"""The checks that attention, right or wrong, has no part in."""

FAULTS = {
    "backend-ignores-lengths": Fault(
        backend=IgnoresLengths, found_by={"attention", "oracle"}, spares={"bit_equal", *MECHANISM}
    ),
    "backend-ignores-prefix": Fault(
        backend=IgnoresPrefix,
        found_by={"attention", "oracle", "one_pass"},
        spares={"bit_equal", "raw_shape", *MECHANISM},
    ),
    "backend-aligns-top-left": Fault(
        backend=AlignsTopLeft,
        found_by={"attention", "oracle", "one_pass"},
        spares={"bit_equal", "raw_shape", *MECHANISM},
    ),
    "backend-assumes-contiguous-pages": Fault(
        backend=AssumesContiguousPages, found_by={"attention", "oracle"}, spares=MECHANISM
    ),
    "backend-zeroes-page-table": Fault(
        backend=ZeroesPageTable, found_by={"attention", "oracle"}, spares=MECHANISM
    ),
    "backend-scales-too-much": Fault(
        backend=ScalesTooMuch, found_by={"attention", "oracle"}, spares={"bit_equal", *MECHANISM}
    ),
    "backend-gives-nan": Fault(
        backend=GivesNaN, found_by={"attention", "oracle"}, spares={"structure"}
    ),
    "backend-keeps-stale-rows": Fault(
        backend=KeepsStaleRows, found_by={"bit_equal", "attention", "oracle"}, spares=MECHANISM
    ),
    "backend-freezes-metadata": Fault(
        backend=FreezesMetadata, found_by={"bit_equal", "attention", "oracle"}, spares={"structure"}
    ),
    "backend-trusts-unwritten-slots": Fault(
        backend=TrustsUnwrittenSlots, found_by={"attention", "oracle"}, spares={"structure"}
    ),
    "backend-writes-row-r": Fault(
        backend=WritesRowR, found_by={"padding"}, spares={"attention", "oracle", "structure"}
    ),
    "backend-writes-row-r-of-the-bucket": Fault(
        backend=WritesRowR,
        cases=[OTHER_PREFIX],
        found_by={"padding"},
        spares={"bit_equal", "attention", "oracle", "structure"},
    ),
    "backend-changes-queries": Fault(
        backend=ChangesQueries, found_by={"attention"}, spares={"oracle", *MECHANISM}
    ),
    "backend-writes-cache": Fault(
        backend=WritesCache, found_by={"kv_isolation"}, spares={"bit_equal", "attention", "padding"}
    ),
    "backend-noisy": Fault(
        backend=Noisy, found_by={"bit_equal"}, spares=set(CHECK_NAMES) - {"bit_equal"}
    ),
    "model-skips-break": Fault(
        model=SkipsBreak, found_by={"structure", "oracle", "kv_isolation"}, spares={"bit_equal"}
    ),
    "model-attends-in-segment": Fault(
        model=AttendsInSegment, found_by={"structure", "oracle"}, spares={"bit_equal"}
    ),
    "model-keeps-python-state": Fault(
        model=KeepsPythonState, found_by={"bit_equal"}, spares={"attention", *MECHANISM}
    ),
    "runner-forgets-padded-inputs": Fault(
        runner=ForgetsPaddedInputs,
        found_by={"padding", "kv_isolation"},
        spares={"attention", "structure"},
    ),
    "runner-forgets-padded-output": Fault(
        runner=ForgetsPaddedOutput, found_by={"padding"}, spares={"structure"}
    ),
    "runner-freezes-slots": Fault(
        runner=FreezesSlots,
        found_by={"bit_equal", "kv_isolation", "attention"},
        spares={"structure"},
    ),
    "runner-pretends-to-replay": Fault(
        runner=PretendsToReplay,
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
    ),
    "runner-falls-back-silently": Fault(
        runner=FallsBackSilently, found_by={"structure"}, spares={"attention", "oracle"}
    ),
    "runner-samples-wrong-row": Fault(
        runner=SamplesWrongRow, found_by={"oracle"}, spares=set(CHECK_NAMES) - {"oracle"}
    ),
    "backend-leaves-out-unwritten": Fault(
        backend=LeavesOutUnwritten, found_by={"attention", "oracle"}, spares={"structure"}
    ),
    "backend-returns-heads-first": Fault(
        backend=ReturnsTransposed,
        cases=[FULL_SMALL],  # as many tokens as heads, so that the shape is right
        found_by={"attention", "oracle"},
        spares={"bit_equal", *MECHANISM},
    ),
    "backend-writes-nan-behind-rows": Fault(
        backend=WritesNaNBehindRows, found_by={"padding"}, spares={"structure"}
    ),
    "backend-writes-late": Fault(
        backend=WritesLate, found_by={"attention", "oracle"}, spares={"structure"}
    ),
    "backend-freezes-boundaries": Fault(
        backend=FreezesBoundaries, found_by={"attention", "oracle"}, spares=MECHANISM
    ),
    "backend-caches-by-shape": Fault(
        backend=CachesByShape,
        cases=[OTHER_PREFIX],
        found_by={"attention", "oracle"},
        spares=MECHANISM,
    ),
    "backend-shares-plans": Fault(
        backend=SharesPlans,
        cases=[TWO_BUCKETS],
        found_by={"bit_equal", "attention", "oracle"},
        spares=MECHANISM,
    ),
    "backend-caps-length": Fault(
        backend=CapsLength, found_by={"attention", "oracle"}, spares=MECHANISM
    ),
    "backend-drops-full-last-page": Fault(
        backend=DropsFullLastPage,
        cases=[FULL_PAGES],
        found_by={"attention", "oracle"},
        spares={"bit_equal", *MECHANISM},
    ),
    "backend-errs-in-company": Fault(
        backend=ErrsInCompany,
        found_by={"attention", "oracle"},
        spares={"bit_equal", "one_pass", *MECHANISM},
    ),
    "backend-interleaves-heads": Fault(
        backend=InterleavesHeads,
        found_by={"attention", "oracle"},
        spares={"bit_equal", *MECHANISM},
    ),
    "model-leaves-side-channel": Fault(
        model=LeavesSideChannel,
        found_by={"bit_equal", "oracle"},
        spares={"attention", "structure"},
    ),
    "model-freezes-python-number": Fault(
        model=FreezesPythonNumber,
        found_by={"bit_equal"},
        spares={"attention", *MECHANISM},
    ),
    "model-keeps-one-table": Fault(
        model=KeepsOneTable,
        cases=[FULL_SMALL],
        found_by={"bit_equal", "raw_shape"},
        spares={"attention", "oracle", "structure"},
    ),
    "runner-plans-for-padded-count": Fault(
        runner=PlansForPaddedCount, found_by={"structure", "attention"}, spares={"padding"}
    ),
    "runner-plans-for-nobody": Fault(
        runner=PlansForNobody,
        cases=[NOBODY],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
    ),
    "runner-skips-full-bucket": Fault(
        runner=SkipsFullBucket,
        cases=[FULL_SMALL, FULL_LARGE],
        found_by={"structure"},
        spares={"attention", "oracle", "kv_isolation"},
    ),
    "runner-loses-last-row": Fault(
        runner=LosesLastRow,
        cases=[FULL_LARGE],
        found_by={"kv_isolation", "attention", "oracle"},
        spares={"bit_equal", "structure"},
    ),
    "runner-replaces-weights": Fault(
        runner=ReplacesWeights,
        model=lambda model: LlamaModel(model.weights),  # type: ignore[attr-defined]
        found_by={"bit_equal", "raw_shape"},
        spares={"attention", "oracle", *MECHANISM},
    ),
    "engine-runs-python-again": Fault(
        runner=RunsPythonAgain,
        found_by={"structure"},
        spares={"bit_equal", "oracle", "kv_isolation"},
    ),
}


def results_of(fault: Fault, model: LlamaModel) -> list[CheckResult]:
    matrix = Matrix(
        model,
        fault.cases,
        BUCKETS,
        RandomTokens(model.spec.vocab_size),
        subject=fault.model(model),
        runner_type=fault.runner,
    )
    return matrix.check(fault.backend.name, fault.backend)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_is_found_by_its_check(fault: Fault, small_model: LlamaModel) -> None:
    results = results_of(fault, small_model)
    failed = {result.check for result in results if result.outcome is Outcome.FAILED}
    assert failed >= fault.found_by
    assert failed & fault.spares == set()
    assert [result for result in results if result.outcome is Outcome.ERROR] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", [ScalesTooMuch, GivesNaN, ZeroesPageTable])
def test_faults_in_numbers_are_found_in_16_bit_types(
    backend: type[AttentionBackend], dtype: torch.dtype
) -> None:
    model = random_llama(replace(PRESETS["tiny"], num_layers=2), dtype=dtype)
    results = results_of(Fault(backend=backend, found_by=set(), spares=set()), model)
    failed = [result for result in results if result.outcome is Outcome.FAILED]
    assert "attention" in {result.check for result in failed}


def test_the_layer_that_gives_nan_is_named(small_model: LlamaModel) -> None:
    results = results_of(Fault(backend=GivesNaN, found_by=set(), spares=set()), small_model)
    details = [result.detail for result in results if result.check == "attention"]
    assert details
    assert all(detail.startswith("layer 0, request 0: error inf") for detail in details)


def test_declared_noise_is_held_to_a_budget(small_model: LlamaModel) -> None:
    fault = Fault(backend=HonestlyNoisy, found_by=set(), spares=set(CHECK_NAMES))
    results = results_of(fault, small_model)
    assert {result.outcome for result in results} == {Outcome.PASSED}
    assert all(result.budget for result in results if result.check == "bit_equal")


def test_an_exception_is_an_error_of_its_case_alone(small_model: LlamaModel) -> None:
    results = results_of(Fault(backend=Raises, found_by=set(), spares=set()), small_model)
    errors = {result.case: result.detail for result in results if result.outcome is Outcome.ERROR}
    assert set(errors) == {"cached-prefixes", "large-then-small"}
    assert errors["large-then-small"].startswith(
        "RuntimeError: one request at a time, please (faulty_backends.py:"
    )
    assert {result.case for result in results if result.outcome is Outcome.PASSED} == {
        "one-request",
        "five-chunks",
    }


HARMLESS = [
    IgnoresOut,
    ReturnsOffsetView,
    ReturnsStrided,
    SplitsByComposition,
    DividesByRequests,
    AllocatesAtReplay,
    ReadsOnHost,
]


@pytest.mark.parametrize("backend", HARMLESS, ids=lambda backend: backend.name)
def test_what_does_no_harm_is_no_fault(
    small_model: LlamaModel, backend: type[AttentionBackend]
) -> None:
    fault = Fault(backend=backend, cases=[*CASES, NOBODY], found_by=set(), spares=set())
    results = results_of(fault, small_model)
    assert [result for result in results if result.outcome is not Outcome.PASSED] == []


@pytest.mark.parametrize(
    "backend",
    [ReturnsTransposed, ReturnsOtherDtype, ReturnsOtherDevice, ReturnsPaddedRows],
    ids=lambda backend: backend.name,
)
def test_an_output_that_breaks_the_contract_is_an_error_that_names_both(
    small_model: LlamaModel, backend: type[AttentionBackend]
) -> None:
    fault = Fault(backend=backend, cases=CASES[:1], found_by=set(), spares=set())
    (result,) = results_of(fault, small_model)
    assert result.outcome is Outcome.ERROR
    assert f"{backend.name!r}: layer 0: forward returned (" in result.detail
    assert "expected (" in result.detail


def test_a_runner_that_plans_for_nobody_ends_a_backend_that_divides_by_requests(
    small_model: LlamaModel,
) -> None:
    fault = Fault(
        backend=DividesByRequests,
        runner=PlansForNobody,
        cases=[NOBODY],
        found_by=set(),
        spares=set(),
    )
    (result,) = results_of(fault, small_model)
    assert result.outcome is Outcome.ERROR
    assert "ZeroDivisionError" in result.detail


def test_a_row_that_is_lost_in_a_full_bucket_is_found_nowhere_else(small_model: LlamaModel) -> None:
    almost = case_of("almost-full", [(0, 20), (1, 11)])
    fault = Fault(runner=LosesLastRow, cases=[almost], found_by=set(), spares=set())
    results = results_of(fault, small_model)
    assert {result.outcome for result in results} == {Outcome.PASSED}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_work_on_a_stream_that_nobody_waits_for_is_found() -> None:
    model = random_llama(replace(PRESETS["tiny"], num_layers=2), device="cuda", fuse=False)
    fault = Fault(backend=RunsOnAnotherStream, cases=CASES[:1], found_by=set(), spares=set())
    failed = {r.check for r in results_of(fault, model) if r.outcome is Outcome.FAILED}
    assert failed >= {"attention", "oracle"}
