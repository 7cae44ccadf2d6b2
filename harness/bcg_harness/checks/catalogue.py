"""All checks, in the order of tables, and the groups of them that commands offer."""

from collections.abc import Mapping
from types import MappingProxyType

from bcg_harness.checks.attention import ATTENTION
from bcg_harness.checks.bits import BIT_EQUAL
from bcg_harness.checks.check import Check
from bcg_harness.checks.full_graph import FULL_GRAPH
from bcg_harness.checks.interleaved import INTERLEAVED
from bcg_harness.checks.kv_isolation import KV_ISOLATION
from bcg_harness.checks.padding import PADDING
from bcg_harness.checks.references import ORACLE, RAW_SHAPE
from bcg_harness.checks.structure import STRUCTURE

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        check.name: check
        for check in (
            BIT_EQUAL,
            RAW_SHAPE,
            ORACLE,
            ATTENTION,
            STRUCTURE,
            KV_ISOLATION,
            PADDING,
            INTERLEAVED,
            FULL_GRAPH,
        )
    }
)
"""The checks of a step by name."""

ONE_PASS = "one_pass"
"""The check of a whole case: a request prefilled in chunks against one pass over all of it."""

CHECK_NAMES = (*CHECKS, ONE_PASS)
"""All names of checks, in the order of tables."""

MECHANISM = (BIT_EQUAL.name, STRUCTURE.name, KV_ISOLATION.name, PADDING.name)
"""The checks that compare replay with padded eager alone: they need no reference, and cost a fraction of all."""

REFERENCED = frozenset({RAW_SHAPE.name, ORACLE.name, FULL_GRAPH.name, ONE_PASS})
"""The checks whose budgets or expectations come from the reference."""
