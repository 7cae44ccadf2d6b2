"""How the tests of the kit ended, counted."""

from collections import Counter

import pytest
import torch

from bcg_harness.conformance.subjects import CheckOfCase, KnownFailure, Subject
from bcg_harness.conformance.verdict import Verdict
from bcg_harness.outcome import CheckResult

_NOTHING = (
    "nothing was checked: every test was skipped, so this run fails; the reasons say what to install, or to choose "
    "with --bcg-device or --bcg-dtype"
)


class Scores:
    """Count outcomes of tests as pytest reports them.

    Attributes:
        outcomes: tests by what pytest calls their outcome, "xfailed" and "xpassed" included.
        checks_run: tests that judged a check, well or badly.
        declared: tests skipped for a limit that the backend declares.
        environment: tests skipped for what is missing here.
        broken: for each backend that cannot be used, the test that says why; its others are skipped.
        results: what the tests were judged from.
        cases: backend and case of all that was judged.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.checks_run = 0
        self.declared = 0
        self.environment = 0
        self.broken: dict[str, str] = {}
        self._unjudged = 0
        self.results: list[CheckResult] = []
        self._known: set[int] = set()
        self.cases: set[tuple[str, str]] = set()

    def add(self, subject: Subject, verdict: Verdict | None, report: pytest.TestReport) -> None:
        """Count ``report`` if it is the last of its test; ``verdict`` is None when judging was interrupted."""
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        outcome = _outcome(report)
        self.outcomes[outcome] += 1
        if verdict is None or isinstance(subject, KnownFailure):
            return
        for result in verdict.results:
            if not self.knows(result):
                self.results.append(result)
                self._known.add(id(result))  # which is kept, so that no other gets its id
        if isinstance(subject, CheckOfCase):
            self.cases.add(subject.place)
        if outcome == "error":
            if verdict.broken_backend is not None:
                self.broken[verdict.broken_backend] = subject.id
        elif outcome != "skipped":
            self.checks_run += 1
        elif verdict.broken_backend is not None:
            self._unjudged += 1
        else:
            self.declared += verdict.declared
            self.environment += not verdict.declared

    def knows(self, result: CheckResult) -> bool:
        """Tell whether an earlier test was judged from ``result``: one for a whole case serves all its tests."""
        return id(result) in self._known

    @property
    def nothing_checked(self) -> bool:
        """Tell whether tests were run and every one was skipped."""
        return bool(self.outcomes) and set(self.outcomes) == {"skipped"}

    @property
    def is_green(self) -> bool:
        """Tell whether something was checked, and nothing failed that is not declared."""
        bad = self.outcomes["failed"] + self.outcomes["error"]
        return self.checks_run > 0 and not bad

    def lines(self, device: torch.device) -> list[str]:
        """Return the summary of a run on ``device``, a line each."""
        on_cpu, on_gpu = (self.checks_run, 0) if device.type == "cpu" else (0, self.checks_run)
        line = (
            f"bcg conformance: {on_cpu} checks run on CPU (emulated graphs), {on_gpu} on GPU; skipped: {self.declared} "
            f"by declaration, {self.environment} by environment"
        )
        if failing := self.outcomes["xfailed"]:
            line += f"; {failing} failed as expected"
        if unjudged := self.outcomes["error"] + self._unjudged:
            line += f"; {unjudged} could not be judged"
        return [line, f"bcg conformance: {_NOTHING}"] if self.nothing_checked else [line]


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed and report.when == "setup":
        return "error"
    return report.outcome
