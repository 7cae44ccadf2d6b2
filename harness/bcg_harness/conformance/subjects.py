"""What the tests of the kit are about, one subject each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bcg_harness.candidates import Candidate
from bcg_harness.conformance.verdict import Verdict
from bcg_harness.expected_failures import EXPECTED_FAILURES, Expectations, ExpectedFailure
from bcg_harness.outcome import CheckResult

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
        expectations: all that is declared of the backend.
        checks: the tests of this run that ``known`` matches.
    """

    known: ExpectedFailure
    expectations: Expectations
    checks: tuple[CheckOfCase, ...]

    @property
    def id(self) -> str:
        """Return backend and pattern."""
        return f"{self.expectations.backend}-{EXPECTED_FAILURES}-{self.known.pattern}"

    def judge(self, kit: "Kit") -> Verdict:
        """Fail when every test passes that could be run."""
        outcomes = (check.judge(kit).outcome for check in self.checks)
        outcome, reason = self.expectations.judge(self.known, outcomes)
        return Verdict(outcome=outcome, reason=reason)
