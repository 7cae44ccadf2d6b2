"""What a check can say of a case is known before the case is run."""

import pytest

from bcg_core import Capabilities, TokenBuckets
from bcg_harness.builtin import builtin_cases
from bcg_harness.case_checks import applies, case_checks

PLAIN = Capabilities()
CAPTURABLE = Capabilities(supports_full_graph=True)
BUCKETS = TokenBuckets([16, 64])
CASES = {case.name: case for case in builtin_cases(BUCKETS)}


@pytest.mark.parametrize(
    ("check", "case", "expected"),
    [
        ("one_pass", "five-chunks", True),
        ("one_pass", "cached-prefixes", False),  # the prefixes come in steps that are not checked
        ("one_pass", "one-request", False),
        ("padding", "one-request", True),
        ("padding", "above-largest", False),
        ("oracle", "above-largest", True),
        ("interleaved", "one-request", True),
        ("full_graph", "one-request", True),
        ("full_graph", "above-largest", False),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_apply_is_known_beforehand(check: str, case: str, expected: bool) -> None:
    assert applies(check, CASES[case], BUCKETS, CAPTURABLE) is expected


def test_a_backend_that_cannot_be_captured_has_no_checks_of_full_graphs() -> None:
    assert "full_graph" not in {check for check, _ in case_checks(CASES.values(), BUCKETS, PLAIN)}


def test_checks_are_listed_case_by_case_less_what_cannot_apply() -> None:
    found = case_checks([CASES["above-largest"], CASES["two-chunks"]], BUCKETS, CAPTURABLE)
    assert [case for _, case in found] == ["above-largest"] * 7 + ["two-chunks"] * 10
    assert ("padding", "above-largest") not in found


@pytest.mark.parametrize("buckets", [[1], [5, 6], [8, 32], [16, 64, 256], [2048]], ids=str)
@pytest.mark.parametrize(
    ("page_size", "max_context"), [(1, 2048), (3, 2048), (256, 2048), (16, 512), (16, 131072)]
)
def test_which_checks_there_are_depends_on_neither_pages_nor_contexts(
    buckets: list[int], page_size: int, max_context: int
) -> None:
    ladder = TokenBuckets(buckets)
    cases = builtin_cases(ladder, page_size=page_size, max_context=max_context)
    found = case_checks(cases, ladder, CAPTURABLE)
    assert found == case_checks(builtin_cases(ladder), ladder, CAPTURABLE)
