"""What became of a check, and of a whole run of them."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from traceback import extract_tb, format_exception
from typing import Any

from bcg_core import BcgError
from bcg_harness.budgets import MOST_BUDGET, Comparison

_NAMED_PROBLEMS = 3


class Outcome(Enum):
    """Name what became of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not possible here, for a reason that is no fault: not installed, or a limit that the backend declares."""
    XFAILED = "xfailed"
    """Failed or could not be judged, as the author of the backend declares, with a reason."""
    ERROR = "error"
    """Could not be judged: a backend that fails to load or raises, or that was asked for and is missing."""

    @property
    def is_bad(self) -> bool:
        """Tell whether this outcome makes a run fail."""
        return self in (Outcome.FAILED, Outcome.ERROR)

    @property
    def is_good(self) -> bool:
        """Tell whether this outcome shows that something was checked, and is as it has to be expected."""
        return self in (Outcome.PASSED, Outcome.XFAILED)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Hold the outcome of one check at one step of a case, or of all that could not be run.

    Attributes:
        outcome: what became of it.
        backend: whose result was checked.
        case: name of the case; None when the backend could not be used at all.
        step: position in the case; None for the case as a whole.
        check: name of the check; None when none could be made.
        detail: reason of anything but a pass; what was compared otherwise.
        error: measured relative error, where a budget applies.
        budget: the most that error may be.
        traceback: of the exception that made this an error.
        declared: whether what made this a skip is a limit that the backend declares, and nothing that is missing here.
        expected: the reason why the author of the backend expects this failure.
    """

    outcome: Outcome
    backend: str
    case: str | None = None
    step: int | None = None
    check: str | None = None
    detail: str = ""
    error: float | None = None
    budget: float | None = None
    traceback: str | None = None
    declared: bool = False
    expected: str | None = None

    @property
    def load(self) -> float | None:
        """Return the error as a fraction of its budget; None where no budget applies."""
        return None if self.error is None or not self.budget else self.error / self.budget

    @classmethod
    def of(cls, finding: "Finding", *, backend: str, case: str, step: int | None) -> "CheckResult":
        """Say of which backend, case and step ``finding`` is."""
        return cls(
            outcome=finding.outcome,
            backend=backend,
            case=case,
            step=step,
            check=finding.check,
            detail=finding.detail,
            error=finding.error,
            budget=finding.budget,
            declared=finding.skipped,
        )

    @classmethod
    def skip(
        cls, reason: str, *, backend: str, case: str | None = None, declared: bool
    ) -> "CheckResult":
        """Say why ``case``, or everything, cannot be run, and whether the backend declares that."""
        return cls(
            outcome=Outcome.SKIPPED, backend=backend, case=case, detail=reason, declared=declared
        )

    @classmethod
    def broken(
        cls,
        error: BaseException,
        *,
        backend: str,
        case: str | None = None,
        step: int | None = None,
    ) -> "CheckResult":
        """Say where ``error`` was raised, and keep its traceback."""
        return cls(
            outcome=Outcome.ERROR,
            backend=backend,
            case=case,
            step=step,
            detail=describe(error),
            traceback="".join(format_exception(error)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; errors and budgets that are not finite become None, and ``detail`` tells of them."""
        return {
            "outcome": self.outcome.value,
            "backend": self.backend,
            "case": self.case,
            "step": self.step,
            "check": self.check,
            "detail": self.detail,
            "error": _finite(self.error),
            "budget": _finite(self.budget),
            **({} if self.expected is None else {"expected": self.expected}),
            **({} if self.traceback is None else {"traceback": self.traceback}),
        }


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Hold what a check found, before it is known of which backend, case and step.

    Attributes:
        check: name of the check.
        passed: whether all is well.
        detail: what was compared, or what is wrong.
        error: measured relative error, where a budget applies.
        budget: the most that error may be.
        judged: False when ``budget`` is too large, or no number, to tell right from wrong.
        skipped: whether the check could not be made, for a limit that the backend declares.
    """

    check: str
    passed: bool
    detail: str = ""
    error: float | None = None
    budget: float | None = None
    judged: bool = True
    skipped: bool = False

    @property
    def outcome(self) -> Outcome:
        """Return what becomes of the check."""
        if self.skipped:
            return Outcome.SKIPPED
        if not self.judged:
            return Outcome.ERROR
        return Outcome.PASSED if self.passed else Outcome.FAILED

    @classmethod
    def of(cls, check: str, comparison: Comparison) -> "Finding":
        """Judge ``comparison``."""
        if not comparison.judgeable:
            return cls(
                check=check,
                passed=False,
                detail=f"{comparison.what}: cannot be judged: budget {comparison.budget:.2e} is above {MOST_BUDGET}, "
                "as rounding alone makes such errors on this data",
                error=comparison.error,
                budget=comparison.budget,
                judged=False,
            )
        verdict = "within budget" if comparison.within else "exceeds its budget"
        found = f"error {comparison.error:.2e} {verdict} {comparison.budget:.2e}"
        if comparison.worst and not comparison.within:
            found += f", worst in {comparison.worst}"
        return cls(
            check=check,
            passed=comparison.within,
            detail=f"{comparison.what}: {comparison.not_finite or found}",
            error=comparison.error,
            budget=comparison.budget,
        )

    @classmethod
    def skip(cls, check: str, reason: str) -> "Finding":
        """Say by which declared limit the check cannot be made."""
        return cls(check=check, passed=False, detail=reason, skipped=True)

    @classmethod
    def listing(cls, check: str, problems: list[str]) -> "Finding":
        """Pass when there are no ``problems``; of many, name the first few."""
        different = list(dict.fromkeys(problems))
        named = different[:_NAMED_PROBLEMS]
        if len(different) > len(named):
            named.append(f"and {len(different) - len(named)} more")
        return cls(check=check, passed=not problems, detail="; ".join(named))


def describe(error: BaseException) -> str:
    """Return type, message, place and notes of ``error`` in one line; of our own errors the message says it all."""
    message = str(error)
    if not isinstance(error, BcgError):
        message = f"{type(error).__name__}: {error}"
        if frames := extract_tb(error.__traceback__):
            message += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return "; ".join([message, *getattr(error, "__notes__", [])])


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def tally(results: Iterable[CheckResult]) -> Counter[Outcome]:
    """Count results by outcome."""
    return Counter(result.outcome for result in results)


def is_green(results: Iterable[CheckResult]) -> bool:
    """Tell whether something was checked and nothing failed or broke unexpectedly; skips alone are not green."""
    outcomes = set(tally(results))
    return any(o.is_good for o in outcomes) and not any(o.is_bad for o in outcomes)
