"""The checks of one step: each judges what the arms of the step did, and answers for one kind of fault.

Three references are kept apart: ``bit_equal`` judges the mechanism against padded eager, ``raw_shape`` the padding
against eager without any, ``oracle`` and ``attention`` everything against independent computations.
"""

from bcg_harness.checks.catalogue import CHECK_NAMES, CHECKS, MECHANISM, ONE_PASS, REFERENCED
from bcg_harness.checks.check import Check
from bcg_harness.checks.record import StepRecord

__all__ = [
    "CHECKS",
    "CHECK_NAMES",
    "MECHANISM",
    "ONE_PASS",
    "REFERENCED",
    "Check",
    "StepRecord",
]
