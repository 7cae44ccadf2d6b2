"""What the author of a backend declares as known to fail, and what becomes of it: the same in every command.

Strict, pattern by pattern: a pattern whose checks all pass is a failure of its own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from bcg_core import TokenBuckets
from bcg_core.errors import PASSED_ON
from bcg_harness.builtin import builtin_cases
from bcg_harness.candidates import Candidate
from bcg_harness.case_checks import CaseCheck, case_checks
from bcg_harness.cases import Case
from bcg_harness.errors import HarnessError
from bcg_harness.outcome import CheckResult, Outcome

EXPECTED_FAILURES = "expected_failures"
"""Stands where the name of a check does in what is said of a pattern."""


@dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """Hold a pattern over ``check-case`` and the reason why what it matches fails."""

    pattern: str
    reason: str

    def matches(self, check: str, case: str) -> bool:
        """Tell whether ``check`` of ``case`` is among what is expected to fail."""
        return fnmatchcase(f"{check}-{case}", self.pattern)


@dataclass(frozen=True, kw_only=True)
class Expectations:
    """Hold what is declared of one backend, and the checks of a run that it is about.

    Attributes:
        backend: its label.
        known: what is declared; of several that match a check, the first counts.
        run: the checks of this run.
        possible: those of any run: of all built-in cases, and of this one's own. A pattern over others is not stale
            because a run leaves them out.
    """

    backend: str
    known: tuple[ExpectedFailure, ...]
    run: tuple[CaseCheck, ...]
    possible: frozenset[CaseCheck]

    @classmethod
    def of(
        cls, candidate: Candidate, cases: Sequence[Case], buckets: TokenBuckets
    ) -> "Expectations":
        """Ask the class of ``candidate``; raises HarnessError for anything but patterns with reasons."""
        capabilities = candidate.selected.capabilities
        run = case_checks(cases, buckets, capabilities)
        return cls(
            backend=candidate.label,
            known=_declared(candidate),
            run=tuple(run),
            possible=frozenset([*run, *case_checks(builtin_cases(buckets), buckets, capabilities)]),
        )

    def expected(self, check: str, case: str) -> ExpectedFailure | None:
        """Return why ``check`` of ``case`` is expected to fail; None when it has to pass."""
        return next((known for known in self.known if known.matches(check, case)), None)

    def matched(self, known: ExpectedFailure) -> list[CaseCheck]:
        """Return the checks of this run that ``known`` is about."""
        return [(check, case) for check, case in self.run if known.matches(check, case)]

    def warnings(self) -> list[str]:
        """Say of each pattern that matches no check of any run that it does not."""
        return [
            f"expected failure {known.pattern!r} of {self.backend} matches no test: patterns are over 'check-case', "
            "such as 'raw_shape-*' or 'oracle-two-requests'"
            for known in self._strays()
        ]

    def in_force(self) -> list[ExpectedFailure]:
        """Return what is declared less the patterns that are warned of."""
        strays = self._strays()
        return [known for known in self.known if known not in strays]

    def _strays(self) -> list[ExpectedFailure]:
        return [
            known for known in self.known if not any(known.matches(*at) for at in self.possible)
        ]

    def judge(self, known: ExpectedFailure, outcomes: Iterable[Outcome]) -> tuple[Outcome, str]:
        """Say whether ``known`` still fails, given the outcome of each check in ``matched(known)``.

        Passes when one of them is bad and fails when all are good; skipped, with the reason, when it cannot be told.
        """
        counts = Counter(outcomes)
        if any(outcome.is_bad for outcome in counts):
            return Outcome.PASSED, ""
        if len(self.matched(known)) < sum(known.matches(*at) for at in self.possible):
            return Outcome.SKIPPED, "not all tests that the pattern matches were selected"
        if not counts[Outcome.PASSED]:
            return Outcome.SKIPPED, "no test that the pattern matches could be run"
        return Outcome.FAILED, (
            f"{self.backend} declares that {known.pattern!r} fails ({known.reason}), but all "
            f"{counts[Outcome.PASSED]} tests that it matches pass: remove it from {EXPECTED_FAILURES}()"
        )

    def mark(self, result: CheckResult) -> CheckResult:
        """Return ``result`` as an expected failure, with its reason, if all checks that it stands for are expected."""
        if not result.outcome.is_bad:
            return result
        found = [
            self.expected(check, case) for check, case in self.run if _stands(result, check, case)
        ]
        reasons = list(dict.fromkeys(known.reason for known in found if known is not None))
        if not found or None in found:
            return result
        return replace(result, outcome=Outcome.XFAILED, expected="; ".join(reasons))

    def stale(self, results: Sequence[CheckResult]) -> list[CheckResult]:
        """Return a failure for each pattern that no longer fails, judged by the unmarked results of a whole run."""
        found = []
        for known in self.in_force():
            outcomes = (_outcome(results, *at) for at in self.matched(known))
            outcome, reason = self.judge(known, outcomes)
            if outcome.is_bad:
                found.append(
                    CheckResult(
                        outcome=outcome,
                        backend=self.backend,
                        check=EXPECTED_FAILURES,
                        detail=reason,
                    )
                )
        return found


def expectations_of(
    candidates: Iterable[Candidate], cases: Sequence[Case], buckets: TokenBuckets
) -> tuple[list[tuple[Candidate, Expectations]], list[CheckResult]]:
    """Return each of ``candidates`` with what is declared of it, and errors for those that declare it wrongly."""
    declared: list[tuple[Candidate, Expectations]] = []
    broken: list[CheckResult] = []
    for candidate in candidates:
        try:
            declared.append((candidate, Expectations.of(candidate, cases, buckets)))
        except HarnessError as error:
            broken.append(
                CheckResult(outcome=Outcome.ERROR, backend=candidate.label, detail=str(error))
            )
        except PASSED_ON:
            raise
        except BaseException as error:  # noqa: BLE001  # a broken plug-in hides no other
            broken.append(CheckResult.broken(error, backend=candidate.label))
    return declared, broken


def _declared(candidate: Candidate) -> tuple[ExpectedFailure, ...]:
    declared = candidate.selected.expected_failures()
    if not isinstance(declared, Mapping):
        raise HarnessError(
            f"expected_failures() of {candidate.label} is {declared!r}: it has to map patterns over 'check-case' to "
            "reasons"
        )
    for pattern, reason in declared.items():
        if not isinstance(pattern, str) or not isinstance(reason, str) or not reason.strip():
            raise HarnessError(
                f"expected_failures() of {candidate.label} has {pattern!r}: {reason!r}: say why it fails, in a string"
            )
    return tuple(ExpectedFailure(pattern=p, reason=reason) for p, reason in declared.items())


def _stands(result: CheckResult, check: str, case: str) -> bool:
    """Tell whether ``result`` is of ``check`` in ``case``, or of the whole case or the whole backend."""
    return result.case in (case, None) and result.check in (check, None)


def _outcome(results: Iterable[CheckResult], check: str, case: str) -> Outcome:
    """Return what became of ``check`` in ``case``: good only when all its steps are."""
    found = {result.outcome for result in results if _stands(result, check, case)}
    bad = next((outcome for outcome in found if outcome.is_bad), None)
    if bad is not None:
        return bad
    return Outcome.SKIPPED if Outcome.SKIPPED in found or not found else Outcome.PASSED
