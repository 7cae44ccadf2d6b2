"""Print the table of faults as it stands in ``docs/faults.md``."""

from bcg_harness.faults.table import render

print(render(), end="")
