"""Every layer's attention, as computed during a replay, by its definition on the same inputs."""

from collections.abc import Iterator
from dataclasses import replace

from bcg_harness.budgets import Comparison, judge, worst
from bcg_harness.checks.check import Check, Condition, has_requests
from bcg_harness.checks.record import StepRecord
from bcg_harness.probe import Trace


def _trace(record: StepRecord) -> Trace:
    assert record.judged is not None, "applies() has seen to that"
    return record.judged.trace


def _called(record: StepRecord) -> Iterator[str]:
    if not _trace(record).measured:
        yield "the backend was never called"


def _kept(name: str) -> Condition:
    def condition(record: StepRecord) -> Iterator[str]:
        for layer, changed in _trace(record).changed:
            if changed == name:
                yield f"layer {layer}: the backend changed {name}"

    return condition


def _cached(name: str) -> Condition:
    def condition(record: StepRecord) -> Iterator[str]:
        for layer, missing in _trace(record).missing:
            if missing == name:
                yield f"layer {layer}: the slots of the batch do not hold its {name}"

    return condition


def _measured(record: StepRecord) -> Comparison:
    """Judge real and sharp logits apart, as rounding errs more on the latter."""
    found = worst(judge(found) for found in (_trace(record).measured, record.sharp) if found)
    if not found.not_finite:
        return found
    # Output rows are NaN beforehand. So are slots that nobody wrote, where the backend claims to stand that.
    cause = "never written, or an overflow"
    if record.capabilities.ignores_foreign_nan:
        cause = (
            "never written, an overflow, or computed from an unwritten cache slot: these hold NaN, as the backend "
            "declares ignores_foreign_nan"
        )
    return replace(found, not_finite=f"{found.not_finite}: {cause}")


ATTENTION = Check(
    name="attention",
    applies=lambda record: has_requests(record) and record.judged is not None,
    conditions={
        "called": _called,
        "q kept": _kept("q"),
        "k kept": _kept("k"),
        "v kept": _kept("v"),
        "cached keys kept": _kept("the cached keys"),
        "cached values kept": _kept("the cached values"),
        "keys cached": _cached("keys"),
        "values cached": _cached("values"),
    },
    comparison=_measured,
)
"""Judge every layer's attention, and that its inputs are in the cache, and are left as they are there too."""
