"""Every fault that the checks exist for is found, and by the check that is there for it.

And no check has a condition that none of these faults needs.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from bcg_backends.sdpa import SDPABackend
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
    case_run,
)
from bcg_harness.checks import CHECKS, Check
from bcg_harness.testing import (
    AddsToForeignSlot,
    AlignsTopLeft,
    AllocatesAtReplay,
    AssumesContiguousPages,
    AttendsInSegment,
    AttendsTwice,
    BreaksTwice,
    CachesByShape,
    CachesOtherKeys,
    CachesOtherValues,
    CannotBeCaptured,
    CapsLength,
    ChangesCachedKeys,
    ChangesCachedValues,
    ChangesDeviceLengths,
    ChangesKeys,
    ChangesPageTable,
    ChangesQueries,
    ChangesValues,
    CountsNoReason,
    CountsTwice,
    DividesByRequests,
    DividesBySlot,
    DropsBucket,
    DropsFullLastPage,
    ErrsInCompany,
    FallsBackSilently,
    ForgetsPaddedIds,
    ForgetsPaddedInputs,
    ForgetsPaddedOutput,
    ForgetsPaddedPositions,
    ForgetsPaddedSlots,
    FreezesBoundaries,
    FreezesMetadata,
    FreezesNoisily,
    FreezesPythonNumber,
    FreezesSlots,
    GivesNaN,
    GivesNoReason,
    GivesPaddedRows,
    HonestlyNoisy,
    IgnoresLengths,
    IgnoresOut,
    IgnoresPrefix,
    InterleavesHeads,
    KeepsLastPlan,
    KeepsLastPlanNoisily,
    KeepsOneTable,
    KeepsPythonState,
    KeepsStaleRows,
    LeavesOutUnwritten,
    LeavesSideChannel,
    LosesLastRow,
    MaskBackend,
    MasksSoftly,
    NeverRefreshesGraph,
    Noisy,
    OverflowsSoftmax,
    PlansForNobody,
    PlansForPaddedCount,
    PretendsToReplay,
    Raises,
    ReadsEarly,
    ReadsOnHost,
    ReplacesWeights,
    ReturnsNewTensor,
    ReturnsOffsetView,
    ReturnsOtherDevice,
    ReturnsOtherDtype,
    ReturnsPaddedRows,
    ReturnsStrided,
    ReturnsTransposed,
    ReturnsTransposedSquare,
    RunsInOneBreak,
    RunsOnAnotherStream,
    RunsPythonAgain,
    SamplesWrongRow,
    ScalesTooMuch,
    SharesPlans,
    SharesPlanSlots,
    SkipsBreak,
    SkipsFullBucket,
    SplitsByComposition,
    SpoilsCache,
    SpoilsFirstReplay,
    SpoilsHidden,
    SpoilsLogits,
    SpoilsReservedPage,
    TrustsUnwrittenSlots,
    WarmsUpLate,
    WritesCache,
    WritesCacheInGraph,
    WritesLate,
    WritesNaNBehindRows,
    WritesRowR,
    ZeroesPageTable,
)
from bcg_harness.testing.mask_backend import LayerCall
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
TOO_LARGE = case_of("too-large", [(0, 20), (1, 13)])
TWO_LENGTHS = case_of("two-lengths", [(0, 20), (1, 5)])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Name who is at fault, which checks must find it, and which must not be disturbed by it.

    ``alone`` names, for some of the checks that find it, the one condition that does, or the budget.
    """

    found_by: set[str]
    spares: set[str]
    alone: Mapping[str, str] = field(default_factory=dict)
    backend: type[AttentionBackend] = MaskBackend
    model: Callable[[PrefillModel], PrefillModel] = lambda model: model
    runner: type[PrefillRunner] = PrefillRunner
    cases: Sequence[Case] = field(default_factory=lambda: CASES)


BUDGET = "budget"
"""Stands for what a check compares within a budget."""

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
        backend=ScalesTooMuch,
        found_by={"attention", "oracle"},
        spares={"bit_equal", *MECHANISM},
        alone={"attention": BUDGET, "oracle": BUDGET},
    ),
    "backend-gives-nan": Fault(
        backend=GivesNaN,
        found_by={"attention", "oracle", "bit_equal"},
        spares={"structure", "padding"},
        alone={"bit_equal": "finite"},
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
        alone={"padding": "output zero"},
    ),
    "backend-writes-row-r-of-a-full-bucket": Fault(
        backend=WritesRowR,
        cases=[FULL_SMALL],
        found_by={"padding"},
        spares=set(CHECK_NAMES) - {"padding"},
        alone={"padding": "output beyond"},
    ),
    "backend-writes-row-r-of-the-largest-bucket": Fault(
        backend=WritesRowR,
        cases=[FULL_LARGE],
        found_by={"padding"},
        spares=set(CHECK_NAMES) - {"padding"},
        alone={"padding": "output beyond"},
    ),
    "backend-changes-keys": Fault(
        backend=ChangesKeys,
        cases=[OTHER_PREFIX],
        found_by={"attention"},
        spares=set(CHECK_NAMES) - {"attention"},
        alone={"attention": "k kept"},
    ),
    "backend-changes-values": Fault(
        backend=ChangesValues,
        cases=[OTHER_PREFIX],
        found_by={"attention"},
        spares=set(CHECK_NAMES) - {"attention"},
        alone={"attention": "v kept"},
    ),
    "backend-changes-cached-keys": Fault(
        backend=ChangesCachedKeys,
        cases=[FULL_SMALL],
        found_by={"attention"},
        spares=set(CHECK_NAMES) - {"attention"},
        alone={"attention": "cached keys kept"},
    ),
    "backend-changes-cached-values": Fault(
        backend=ChangesCachedValues,
        cases=[FULL_SMALL],
        found_by={"attention"},
        spares=set(CHECK_NAMES) - {"attention"},
        alone={"attention": "cached values kept"},
    ),
    "backend-adds-to-foreign-slot": Fault(
        backend=AddsToForeignSlot,
        found_by={"kv_isolation"},
        spares=set(CHECK_NAMES) - {"kv_isolation"},
    ),
    "backend-ignores-out": Fault(
        backend=IgnoresOut,
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "out"},
    ),
    "backend-changes-page-table": Fault(
        backend=ChangesPageTable,
        cases=[TWO_LENGTHS],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "host arrays"},
    ),
    "backend-changes-device-lengths": Fault(
        backend=ChangesDeviceLengths,
        cases=[OTHER_PREFIX],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "device arrays"},
    ),
    "backend-spoils-reserved-page": Fault(
        backend=SpoilsReservedPage,
        cases=[OTHER_PREFIX],
        found_by={"kv_isolation"},
        spares=set(CHECK_NAMES) - {"kv_isolation"},
        alone={"kv_isolation": "page 0 finite"},
    ),
    "backend-freezes-noisily": Fault(
        backend=FreezesNoisily,
        found_by={"bit_equal", "attention", "oracle"},
        spares={"structure"},
        alone={"bit_equal": BUDGET},
    ),
    "backend-changes-queries": Fault(
        backend=ChangesQueries,
        found_by={"attention"},
        spares={"oracle", *MECHANISM},
        alone={"attention": "q kept"},
    ),
    "backend-writes-cache": Fault(
        backend=WritesCache,
        found_by={"kv_isolation"},
        spares={"bit_equal", "attention", "padding"},
        alone={"kv_isolation": "others kept"},
    ),
    "backend-noisy": Fault(
        backend=Noisy,
        found_by={"bit_equal"},
        spares=set(CHECK_NAMES) - {"bit_equal", "interleaved"},
    ),
    "model-skips-break": Fault(
        model=SkipsBreak, found_by={"structure", "oracle", "kv_isolation"}, spares={"bit_equal"}
    ),
    "model-attends-in-segment": Fault(
        model=AttendsInSegment,
        found_by={"structure", "attention", "oracle"},
        spares={"bit_equal"},
        alone={"attention": "called"},
    ),
    "model-breaks-twice": Fault(
        model=BreaksTwice,
        cases=[OTHER_PREFIX],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "breaks"},
    ),
    "model-runs-in-one-break": Fault(
        model=RunsInOneBreak,
        cases=[OTHER_PREFIX],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "breaks"},
    ),
    "model-attends-twice": Fault(
        model=AttendsTwice,
        cases=[OTHER_PREFIX],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "layers"},
    ),
    "model-caches-other-keys": Fault(
        model=CachesOtherKeys,
        cases=[OTHER_PREFIX],
        found_by={"attention", "oracle"},
        spares={"bit_equal", *MECHANISM},
        alone={"attention": "keys cached"},
    ),
    "model-caches-other-values": Fault(
        model=CachesOtherValues,
        cases=[OTHER_PREFIX],
        found_by={"attention", "oracle"},
        spares={"bit_equal", *MECHANISM},
        alone={"attention": "values cached"},
    ),
    "model-divides-by-slot": Fault(
        model=DividesBySlot,
        cases=[OTHER_PREFIX],
        found_by={"padding"},
        spares=set(CHECK_NAMES) - {"padding"},
        alone={"padding": "finite"},
    ),
    "model-keeps-python-state": Fault(
        model=KeepsPythonState, found_by={"bit_equal"}, spares={"attention", *MECHANISM}
    ),
    "runner-forgets-padded-inputs": Fault(
        runner=ForgetsPaddedInputs,
        found_by={"padding", "kv_isolation"},
        spares={"attention", "structure"},
    ),
    "runner-forgets-padded-ids": Fault(
        runner=ForgetsPaddedIds,
        cases=[OTHER_PREFIX],
        found_by={"padding"},
        spares=set(CHECK_NAMES) - {"padding"},
        alone={"padding": "ids"},
    ),
    "runner-forgets-padded-positions": Fault(
        runner=ForgetsPaddedPositions,
        cases=[OTHER_PREFIX],
        found_by={"padding"},
        spares=set(CHECK_NAMES) - {"padding"},
        alone={"padding": "positions"},
    ),
    "runner-forgets-padded-slots": Fault(
        runner=ForgetsPaddedSlots,
        cases=[OTHER_PREFIX],
        found_by={"padding", "kv_isolation"},
        spares={"structure"},
        alone={"padding": "slots", "kv_isolation": "others kept"},
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
        alone={"structure": "python"},
    ),
    "runner-falls-back-silently": Fault(
        runner=FallsBackSilently,
        found_by={"structure"},
        spares={"attention", "oracle"},
        alone={"structure": "bucket"},
    ),
    "runner-samples-wrong-row": Fault(
        runner=SamplesWrongRow,
        found_by={"oracle"},
        spares=set(CHECK_NAMES) - {"oracle"},
        alone={"oracle": "last tokens"},
    ),
    "backend-leaves-out-unwritten": Fault(
        backend=LeavesOutUnwritten, found_by={"attention", "oracle"}, spares={"structure"}
    ),
    "backend-returns-heads-first": Fault(
        backend=ReturnsTransposedSquare,
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
        alone={"raw_shape": BUDGET},
    ),
    "runner-plans-for-padded-count": Fault(
        runner=PlansForPaddedCount,
        found_by={"structure", "attention"},
        spares={"padding"},
        alone={"structure": "prepared"},
    ),
    "runner-plans-for-nobody": Fault(
        runner=PlansForNobody,
        cases=[NOBODY],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "idle"},
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
        alone={"kv_isolation": "own written"},
    ),
    "runner-loses-last-row-of-a-nan-cache": Fault(
        backend=SDPABackend,
        runner=LosesLastRow,
        cases=[FULL_LARGE],
        found_by={"kv_isolation", "attention"},
        spares={"structure"},
        alone={"kv_isolation": "own written"},
    ),
    "runner-replaces-weights": Fault(
        runner=ReplacesWeights,
        model=lambda model: LlamaModel(model.weights),  # type: ignore[attr-defined]
        found_by={"bit_equal", "raw_shape"},
        spares={"attention", "oracle", *MECHANISM},
    ),
    "runner-drops-bucket": Fault(
        runner=DropsBucket,
        cases=[FULL_LARGE],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "captured"},
    ),
    "runner-counts-twice": Fault(
        runner=CountsTwice,
        cases=[OTHER_PREFIX],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "replays"},
    ),
    "runner-counts-no-reason": Fault(
        runner=CountsNoReason,
        cases=[TOO_LARGE],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "fallbacks"},
    ),
    "runner-gives-no-reason": Fault(
        runner=GivesNoReason,
        cases=[TOO_LARGE],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "reason"},
    ),
    "runner-gives-padded-rows": Fault(
        runner=GivesPaddedRows,
        cases=[OTHER_PREFIX],
        found_by={"structure"},
        spares=set(CHECK_NAMES) - {"structure"},
        alone={"structure": "rows"},
    ),
    "runner-spoils-hidden": Fault(
        runner=SpoilsHidden,
        cases=[FULL_SMALL],
        found_by={"bit_equal"},
        spares=set(CHECK_NAMES) - {"bit_equal"},
        alone={"bit_equal": "hidden states"},
    ),
    "runner-spoils-first-replay": Fault(
        runner=SpoilsFirstReplay,
        cases=[FULL_SMALL],
        found_by={"bit_equal"},
        spares=set(CHECK_NAMES) - {"bit_equal"},
        alone={"bit_equal": "two replays"},
    ),
    "runner-spoils-logits": Fault(
        runner=SpoilsLogits,
        cases=[FULL_SMALL],
        found_by={"bit_equal", "oracle"},
        spares={"attention", "raw_shape", *MECHANISM},
        alone={"bit_equal": "logits", "oracle": "last tokens"},
    ),
    "runner-spoils-cache": Fault(
        runner=SpoilsCache,
        cases=[FULL_SMALL],
        found_by={"bit_equal"},
        spares=set(CHECK_NAMES) - {"bit_equal"},
        alone={"bit_equal": "KV cache"},
    ),
    "engine-runs-python-again": Fault(
        runner=RunsPythonAgain,
        found_by={"structure"},
        spares={"bit_equal", "oracle", "kv_isolation"},
    ),
    "backend-keeps-last-plan": Fault(
        backend=KeepsLastPlan,
        found_by={"interleaved"},
        spares=set(CHECK_NAMES) - {"interleaved"},
        alone={"interleaved": "own batches"},
    ),
    "backend-keeps-last-plan-noisily": Fault(
        backend=KeepsLastPlanNoisily,
        found_by={"interleaved"},
        spares=set(CHECK_NAMES) - {"interleaved"},
        alone={"interleaved": BUDGET},
    ),
    "backend-shares-plan-slots": Fault(
        backend=SharesPlanSlots,
        found_by={"interleaved"},
        spares=set(CHECK_NAMES) - {"interleaved"},
        alone={"interleaved": "another instance"},
    ),
    "backend-never-refreshes-graph": Fault(
        backend=NeverRefreshesGraph,
        found_by={"full_graph"},
        spares=set(CHECK_NAMES) - {"full_graph"},
        alone={"full_graph": BUDGET},
    ),
    "backend-cannot-be-captured": Fault(
        backend=CannotBeCaptured,
        found_by={"full_graph"},
        spares=set(CHECK_NAMES) - {"full_graph"},
        alone={"full_graph": "replayed"},
    ),
    "backend-writes-cache-in-graph": Fault(
        backend=WritesCacheInGraph,
        found_by={"full_graph"},
        spares=set(CHECK_NAMES) - {"full_graph"},
        alone={"full_graph": "others kept"},
    ),
    "backend-overflows-softmax": Fault(
        backend=OverflowsSoftmax,
        found_by={"attention"},
        spares=set(CHECK_NAMES) - {"attention"},
    ),
    "backend-masks-softly": Fault(
        backend=MasksSoftly,
        found_by={"attention"},
        spares=set(CHECK_NAMES) - {"attention"},
    ),
}


def results_of(
    fault: Fault, model: LlamaModel, checks: Collection[str] = CHECK_NAMES
) -> list[CheckResult]:
    matrix = Matrix(
        model,
        fault.cases,
        BUCKETS,
        RandomTokens(model.spec.vocab_size),
        checks=checks,
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


CONDITIONS = [
    (check.name, condition)
    for check in CHECKS.values()
    for condition in [*check.conditions, BUDGET]
]
ALONE = [
    (toy, check, condition)
    for toy, fault in FAULTS.items()
    for check, condition in fault.alone.items()
]


def test_every_condition_is_needed_by_some_fault() -> None:
    compare_nothing = {(name, BUDGET) for name in ("structure", "kv_isolation", "padding")}
    needed = {(check, condition) for _, check, condition in ALONE}
    assert needed == set(CONDITIONS) - compare_nothing


@pytest.mark.parametrize(("toy", "check", "condition"), ALONE, ids=map("-".join, ALONE))
def test_without_the_condition_the_check_does_not_find_the_fault(
    toy: str,
    check: str,
    condition: str,
    small_model: LlamaModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = FAULTS[toy]
    assert check in fault.found_by
    weaker = {**CHECKS, check: without(CHECKS[check], condition)}
    monkeypatch.setattr(case_run, "CHECKS", weaker)
    # One arm runs for `attention` alone, and other checks look at it too.
    results = results_of(fault, small_model, {check, "attention"})
    outcomes = {result.outcome for result in results if result.check == check}
    assert outcomes == {Outcome.PASSED}


def without(check: Check, condition: str) -> Check:
    """Return ``check`` without a condition, or without its budget."""
    if condition == BUDGET:
        return replace(check, comparison=lambda record: None)
    kept = {name: judge for name, judge in check.conditions.items() if name != condition}
    return replace(check, conditions=kept)


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
    named = (
        r"layer 0, request 0: (\d+) of \1 rows (is|are) not finite, first row 0 \(position \d+\): "
    )
    assert [detail for detail in details if not re.match(named, detail)] == []


def detail_of(check: str, backend: type[AttentionBackend], case: Case, model: LlamaModel) -> str:
    """Return what ``check`` says of the last step of ``case``."""
    fault = Fault(backend=backend, cases=[case], found_by=set(), spares=set())
    results = results_of(fault, model, {check, "attention"})
    return next(result.detail for result in reversed(results) if result.check == check)


class SpoilsLastRow(MaskBackend):
    """Replace the last row that belongs to somebody."""

    name = "spoils-last-row"
    value = 7.0

    def attend(self, call: LayerCall) -> torch.Tensor:
        result = super().attend(call)
        result[call.mask_RS[: len(result)].any(1).nonzero().flatten()[-1:]] = self.value
        return result


class LosesLastRowToNaN(SpoilsLastRow):
    name = "loses-last-row-to-nan"
    value = float("nan")


TWO_CHUNKS = case_of("two-chunks", [(0, 9), (1, 3)], [(1, 2), (0, 5)])


def test_the_worst_row_is_named_with_its_position(small_model: LlamaModel) -> None:
    detail = detail_of("attention", SpoilsLastRow, TWO_CHUNKS, small_model)
    assert "request 1, worst row 4 (position 13): error " in detail


def test_a_row_that_is_not_finite_is_named_with_its_position(small_model: LlamaModel) -> None:
    detail = detail_of("attention", LosesLastRowToNaN, TWO_CHUNKS, small_model)
    assert detail == (
        "layer 0, request 1: 1 of 5 rows is not finite, first row 4 (position 13): "
        "never written, or an overflow"
    )


def test_nan_of_who_claims_to_stand_it_hints_at_the_claim(small_model: LlamaModel) -> None:
    detail = detail_of("attention", TrustsUnwrittenSlots, TWO_CHUNKS, small_model)
    assert detail.endswith("these hold NaN, as the backend declares ignores_foreign_nan")


def test_only_slots_that_changed_are_named_where_others_hold_nan(small_model: LlamaModel) -> None:
    detail = detail_of("kv_isolation", AddsToForeignSlot, FULL_SMALL, small_model)
    assert re.fullmatch(r"KV slots outside the batch changed: \[\d+\]", detail)


def test_two_replays_that_differ_hint_at_the_declaration(small_model: LlamaModel) -> None:
    detail = detail_of("bit_equal", Noisy, FULL_SMALL, small_model)
    assert detail.startswith("hidden states of two replays differ: ")
    assert "deterministic=False" in detail


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
    ReturnsNewTensor,
    ReturnsOffsetView,
    ReturnsStrided,
    SplitsByComposition,
    DividesByRequests,
    AllocatesAtReplay,
    ReadsOnHost,
    WarmsUpLate,
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_stream_that_does_not_wait_for_its_inputs_is_found() -> None:
    model = random_llama(replace(PRESETS["tiny"], num_layers=2), device="cuda", fuse=False)
    fault = Fault(backend=ReadsEarly, cases=CASES[:1], found_by=set(), spares=set())
    failed = {r.check for r in results_of(fault, model) if r.outcome is Outcome.FAILED}
    assert "oracle" in failed
