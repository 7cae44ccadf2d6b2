"""One check: conditions that must hold, and a comparison that must stay within its budget."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bcg_harness.budgets import Comparison
from bcg_harness.checks.record import StepRecord
from bcg_harness.outcome import Finding

Condition = Callable[[StepRecord], Iterable[str]]
"""Says what is wrong with a step, a message each; nothing where all is well."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Judge what the arms of a step did, and answer for one kind of fault.

    No condition follows from the others: for each, and for the comparison, there is a fault that only it finds.

    Attributes:
        name: as in tables.
        applies: tells whether a step has anything to judge.
        skipped: says why what applies could not be made here, by a limit that the backend declares; None when it was.
        conditions: what must hold, by name.
        comparison: measures what has a budget, if all conditions hold; None from it when there is nothing to measure.
    """

    name: str
    applies: Callable[[StepRecord], bool]
    skipped: Callable[[StepRecord], str | None] = lambda record: None
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    comparison: Callable[[StepRecord], Comparison | None] = lambda record: None

    def judge(self, record: StepRecord) -> Finding | None:
        """Return what the check finds in ``record``; None where it has nothing it applies to."""
        if not self.applies(record):
            return None
        if (reason := self.skipped(record)) is not None:
            return Finding.skip(self.name, reason)
        problems = [
            problem for condition in self.conditions.values() for problem in condition(record)
        ]
        comparison = None if problems else self.comparison(record)
        if comparison is None:
            return Finding.listing(self.name, problems)
        return Finding.of(self.name, comparison)


def has_requests(record: StepRecord) -> bool:
    """Tell whether the step has any request."""
    return record.batch.num_requests > 0
