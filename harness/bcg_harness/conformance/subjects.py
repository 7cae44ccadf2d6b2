"""What the tests of the kit are about, one subject each."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bcg_core import TokenBuckets
from bcg_harness.candidates import Candidate
from bcg_harness.cases import Case
from bcg_harness.checks import ONE_PASS
from bcg_harness.conformance.expected_failures import ExpectedFailure
from bcg_harness.conformance.verdict import Verdict
from bcg_harness.outcome import CheckResult, Outcome

if TYPE_CHECKING:
    from bcg_harness.conformance.kit import Kit


class Subject(ABC):
    """Be what one test judges."""

    @property
    @abstractmethod
    def id(self) -> str:
        """Return the words in brackets behind the name of the test."""

    @property
    def expected(self) -> ExpectedFailure | None:
        """Return what the author declared of this test; None when it has to pass."""
        return None

    @abstractmethod
    def judge(self, kit: "Kit") -> Verdict:
        """Run what has not run yet, and say what becomes of the test."""


@dataclass(frozen=True, kw_only=True)
class CheckOfCase(Subject):
    """Judge one check of one case with one backend."""

    candidate: Candidate
    check: str
    case: str
    expected: ExpectedFailure | None = None

    @property
    def id(self) -> str:
        """Return backend, check and case."""
        return f"{self.candidate.label}-{self.check}-{self.case}"

    @property
    def place(self) -> tuple[str, str]:
        """Return backend and case, which all checks of the case share."""
        return self.candidate.label, self.case

    def judge(self, kit: "Kit") -> Verdict:
        """Judge by all steps of the case."""
        return kit.verdict(self.candidate, self.check, self.case)


@dataclass(frozen=True, kw_only=True)
class Unusable(Subject):
    """Say why a backend cannot be checked."""

    result: CheckResult

    @property
    def id(self) -> str:
        """Return the backend."""
        return self.result.backend

    def judge(self, kit: "Kit") -> Verdict:
        """Return what was found when the backend was loaded."""
        return Verdict.of_whole(self.result)


@dataclass(frozen=True, kw_only=True)
class KnownFailure(Subject):
    """Judge whether what the author of a backend declares as known to fail still fails.

    Attributes:
        known: what is declared.
        checks: the tests of this run that it matches.
        complete: whether these are all tests that it matches in any run.
    """

    candidate: Candidate
    known: ExpectedFailure
    checks: tuple[CheckOfCase, ...]
    complete: bool

    @property
    def id(self) -> str:
        """Return backend and pattern."""
        return f"{self.candidate.label}-expected_failures-{self.known.pattern}"

    def judge(self, kit: "Kit") -> Verdict:
        """Fail when every test passes that could be run."""
        outcomes = Counter(check.judge(kit).outcome for check in self.checks)
        if any(outcome.is_bad for outcome in outcomes):
            return Verdict(outcome=Outcome.PASSED)
        if not self.complete:
            return Verdict(
                outcome=Outcome.SKIPPED,
                reason="not all tests that the pattern matches were selected",
            )
        if not outcomes[Outcome.PASSED]:
            return Verdict(
                outcome=Outcome.SKIPPED, reason="no test that the pattern matches could be run"
            )
        return Verdict(
            outcome=Outcome.FAILED,
            reason=f"{self.candidate.label} declares that {self.known.pattern!r} fails ({self.known.reason}), but all "
            f"{outcomes[Outcome.PASSED]} tests that it matches pass: remove it from expected_failures()",
        )


def applies(check: str, case: Case, buckets: TokenBuckets) -> bool:
    """Tell whether ``check`` can have something to judge in ``case``, as far as that is known beforehand."""
    if check == "padding":
        return any(step.checked and step.num_tokens <= max(buckets) for step in case.steps)
    if check == ONE_PASS:
        return bool(_whole_chunked(case))
    return True


def _whole_chunked(case: Case) -> list[int]:
    """Return the sequences that come in several chunks, all in checked steps."""
    every = Counter(number for step in case.steps for number, _ in step.requests)
    checked = Counter(number for step in case.steps if step.checked for number, _ in step.requests)
    return [number for number, chunks in every.items() if chunks > 1 and checked[number] == chunks]
