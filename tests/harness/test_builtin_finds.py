"""Faults that show behind some prefixes only are found by the built-in case that is there for them, and by no other."""

from dataclasses import dataclass, replace

import pytest

from bcg_core import TokenBuckets
from bcg_harness import Matrix, Outcome, RandomTokens, builtin_cases
from bcg_harness.testing import (
    DropsFarKeys,
    ForgetsPrefixFromFifthOn,
    ForgetsPrefixFromSeventeenthOn,
    ForgetsPrefixOfDecodeRows,
    LosesFullPageBehindPrefix,
    LosesLastPageOfFullPrefix,
    MaskBackend,
)
from bcg_llama import PRESETS, random_llama

BUCKETS = TokenBuckets([16, 64])


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Name who is at fault, with pages of which size, and the cases in which it fails: these and no others."""

    backend: type[MaskBackend]
    page_size: int
    cases: set[str]


FAULTS = {
    # Pages of 16 tokens end so often that many cases have such a request.
    "full-page-of-16": Fault(
        backend=LosesFullPageBehindPrefix,
        page_size=16,
        cases={"page-edges", "five-chunks", "all-prefixed-edges", "to-the-limit"},
    ),
    "full-page-of-256": Fault(
        backend=LosesFullPageBehindPrefix, page_size=256, cases={"page-edges", "to-the-limit"}
    ),
    "full-prefix-of-256": Fault(
        backend=LosesLastPageOfFullPrefix, page_size=256, cases={"page-edges"}
    ),
    "fifth": Fault(backend=ForgetsPrefixFromFifthOn, page_size=16, cases={"many-prefixes"}),
    "seventeenth": Fault(
        backend=ForgetsPrefixFromSeventeenthOn, page_size=16, cases={"many-prefixes"}
    ),
    "decode-rows": Fault(
        backend=ForgetsPrefixOfDecodeRows, page_size=16, cases={"decode-rows-in-prefill"}
    ),
    "far-keys": Fault(backend=DropsFarKeys, page_size=16, cases={"to-the-limit"}),
}


@pytest.fixture(scope="module")
def matrices() -> dict[int, Matrix]:
    """Return a matrix of all cases with prefixes for each page size, on a model with little to compute."""
    shape = replace(PRESETS["tiny"], num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    model = random_llama(shape)
    return {
        page_size: Matrix(
            model,
            [case for case in builtin_cases(BUCKETS, page_size=page_size) if case.has_prefix],
            BUCKETS,
            RandomTokens(model.spec.vocab_size),
            checks=["attention"],
            page_size=page_size,
        )
        for page_size in (16, 256)
    }


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_behind_some_prefixes_fails_in_its_cases(
    fault: Fault, matrices: dict[int, Matrix]
) -> None:
    results = matrices[fault.page_size].check(fault.backend.name, fault.backend)
    failed = {result.case for result in results if result.outcome is not Outcome.PASSED}
    assert failed == fault.cases
    assert {result.check for result in results} == {"attention"}


@pytest.mark.parametrize("page_size", [16, 256])
def test_a_backend_without_fault_passes(page_size: int, matrices: dict[int, Matrix]) -> None:
    results = matrices[page_size].check("mask", MaskBackend)
    assert {result.outcome for result in results} == {Outcome.PASSED}
