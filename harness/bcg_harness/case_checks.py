"""Which checks there are in which cases, before any has been run."""

from collections import Counter
from collections.abc import Iterable

from bcg_core import Capabilities, TokenBuckets
from bcg_harness.cases import Case
from bcg_harness.checks import CHECK_NAMES, ONE_PASS

CaseCheck = tuple[str, str]
"""A check and a case by their names: what ``check-case`` stands for, as in ``oracle-two-requests``."""


def case_checks(
    cases: Iterable[Case], buckets: TokenBuckets, capabilities: Capabilities
) -> list[CaseCheck]:
    """Return every check of every one of ``cases`` that can have something to judge, case by case."""
    return [
        (check, case.name)
        for case in cases
        for check in CHECK_NAMES
        if applies(check, case, buckets, capabilities)
    ]


def applies(check: str, case: Case, buckets: TokenBuckets, capabilities: Capabilities) -> bool:
    """Tell whether ``check`` can have something to judge in ``case``, as far as that is known beforehand."""
    counts = [step.num_tokens for step in case.steps if step.checked and step.requests]
    served = any(count <= max(buckets) for count in counts)
    if check in ("structure", "kv_isolation"):
        return True
    if check == "padding":
        return served
    if check == "full_graph":
        return capabilities.supports_full_graph and served
    if check == ONE_PASS:
        return bool(_whole_chunked(case))
    return bool(counts)


def _whole_chunked(case: Case) -> list[int]:
    """Return the sequences that come in several chunks, all in checked steps."""
    every = Counter(number for step in case.steps for number, _ in step.requests)
    checked = Counter(number for step in case.steps if step.checked for number, _ in step.requests)
    return [number for number, chunks in every.items() if chunks > 1 and checked[number] == chunks]
