"""Every fault that the checks exist for is found, and by the check that is there for it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from bcg_core import AttentionBackend, PrefillModel, PrefillRunner, TokenBuckets
from bcg_harness import CHECK_NAMES, CheckResult, Matrix, Outcome, RandomTokens, builtin_cases
from bcg_harness.testing import (
    AlignsTopLeft,
    AssumesContiguousPages,
    AttendsInSegment,
    ChangesQueries,
    FallsBackSilently,
    ForgetsPaddedInputs,
    ForgetsPaddedOutput,
    FreezesMetadata,
    FreezesSlots,
    GivesNaN,
    HonestlyNoisy,
    IgnoresLengths,
    IgnoresPrefix,
    KeepsPythonState,
    KeepsStaleRows,
    MaskBackend,
    Noisy,
    PretendsToReplay,
    Raises,
    RunsPythonAgain,
    SamplesWrongRow,
    ScalesTooMuch,
    SkipsBreak,
    TrustsUnwrittenSlots,
    WritesCache,
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


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Name who is at fault, which checks must find it, and which must not be disturbed by it."""

    found_by: set[str]
    spares: set[str]
    backend: type[AttentionBackend] = MaskBackend
    model: Callable[[PrefillModel], PrefillModel] = lambda model: model
    runner: type[PrefillRunner] = PrefillRunner


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
    "engine-runs-python-again": Fault(
        runner=RunsPythonAgain,
        found_by={"structure"},
        spares={"bit_equal", "oracle", "kv_isolation"},
    ),
}


def results_of(fault: Fault, model: LlamaModel) -> list[CheckResult]:
    matrix = Matrix(
        model,
        CASES,
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
