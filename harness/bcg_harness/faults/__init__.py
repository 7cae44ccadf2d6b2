"""The faults that this project guards against: what finds or prevents each, and the tests that prove it.

``python -m bcg_harness.faults`` prints the table as it stands in ``docs/faults.md``.
"""

from bcg_harness.faults.record import Caught, Fault
from bcg_harness.faults.table import FAULTS, render

__all__ = ["FAULTS", "Caught", "Fault", "render"]
