"""The tests of the kit: one for each check of each case with each backend."""

import pytest

from bcg_harness.conformance.verdict import Verdict


def test_backend(verdict: Verdict) -> None:
    """Fail with what the check found; what could not be judged has ended before, as an error or a skip."""
    if verdict.outcome.is_bad:
        pytest.fail(verdict.reason, pytrace=False)
