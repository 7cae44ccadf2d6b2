"""Metadata stays valid while others are prepared."""

from collections.abc import Callable, Iterator

from bcg_harness.budgets import Comparison, bit_equal, judge
from bcg_harness.checks.check import Check, Condition
from bcg_harness.checks.record import StepRecord
from bcg_harness.interleaving import Disturbed, Interleaving


def _found(record: StepRecord) -> Interleaving:
    assert record.interleaving is not None, "applies() has seen to that"
    return record.interleaving


def _undisturbed(which: Callable[[Interleaving], Disturbed]) -> Condition:
    """Return the condition that the result beside other batches has the bits of the one alone, if any result has."""

    def condition(record: StepRecord) -> Iterator[str]:
        found, disturbed = _found(record), which(_found(record))
        beside = f"with metadata from before {disturbed.by} was prepared, the backend"
        if disturbed.result_RNH is None:
            yield f"{beside} raised {disturbed.error}"
        elif record.capabilities.deterministic and not bit_equal(
            found.alone_RNH, disturbed.result_RNH
        ):
            yield f"{beside} computes something else"

    return condition


def _noise(record: StepRecord) -> Comparison | None:
    """Hold a backend that declares itself non-deterministic to the definition of attention instead."""
    if record.capabilities.deterministic:
        return None
    found = _found(record)
    return judge([*found.own.measured, *found.twin.measured])


INTERLEAVED = Check(
    name="interleaved",
    applies=lambda record: record.interleaving is not None,
    conditions={
        "own batches": _undisturbed(lambda found: found.own),
        "another instance": _undisturbed(lambda found: found.twin),
    },
    comparison=_noise,
)
"""Compare what a backend computes with and without other batches between preparing one and attending to it."""
