"""A finished run of checks, with everything needed to read it later."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bcg_core import CaptureReport, ModelSpec
from bcg_harness.cases import Case
from bcg_harness.environment import Environment, describe_model
from bcg_harness.expected_failures import Expectations
from bcg_harness.outcome import CheckResult, Outcome, is_green, tally
from bcg_harness.untested import Untested


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Hold the results of a run and its context.

    Attributes:
        environment: where it ran.
        model: name of the model, as it was asked for.
        spec: shape of the model.
        buckets: captured token counts.
        settings: whatever else was chosen: seed, text.
        capture: what was captured; None when no backend could be used.
        cases: what was run.
        notes: what backends say of themselves, by label.
        untested: what backends declare beyond what was checked, by label.
        results: one for each check of each step, and for all that could not be run.
        expectations: what is declared as known to fail, backend by backend.
        seconds: wall-clock time of the run, loading included.
        planned: how many cases were to be run, all backends together.
        finished: how many of them were.
    """

    environment: Environment
    model: str
    spec: ModelSpec
    buckets: tuple[int, ...]
    settings: Mapping[str, Any]
    capture: CaptureReport | None
    cases: tuple[Case, ...]
    notes: Mapping[str, list[str]]
    untested: Mapping[str, Untested]
    results: tuple[CheckResult, ...]
    expectations: tuple[Expectations, ...]
    seconds: float
    planned: int
    finished: int

    @property
    def backends(self) -> list[str]:
        """Return the names of all backends with results, in order."""
        return list(dict.fromkeys(result.backend for result in self.results))

    @property
    def is_green(self) -> bool:
        """Tell whether something was checked, nothing failed or broke unexpectedly, and nothing was left out."""
        return is_green(self.results) and not self.interrupted

    @property
    def warnings(self) -> list[str]:
        """Return what is wrong with the run itself: declared failures that no check can match."""
        return [warning for declared in self.expectations for warning in declared.warnings()]

    @property
    def interrupted(self) -> bool:
        """Tell whether the run was stopped before its last case."""
        return self.finished < self.planned

    def to_json(self) -> dict[str, Any]:
        """Return all of it as a JSON object."""
        counts = tally(self.results)
        return {
            "environment": self.environment.to_json(),
            "model": {"name": self.model, **describe_model(self.spec)},
            "buckets": list(self.buckets),
            "settings": dict(self.settings),
            "capture": None if self.capture is None else _capture(self.capture),
            "summary": {
                "green": self.is_green,
                "seconds": round(self.seconds, 3),
                "interrupted": self.interrupted,
                "cases_planned": self.planned,
                "cases_finished": self.finished,
                **{outcome.value: counts[outcome] for outcome in Outcome},
            },
            "notes": dict(self.notes),
            "declared_not_tested": {
                label: untested.to_json() for label, untested in self.untested.items()
            },
            "expected_failures": {
                declared.backend: {known.pattern: known.reason for known in declared.known}
                for declared in self.expectations
                if declared.known
            },
            "warnings": self.warnings,
            "cases": [case.to_json() for case in self.cases],
            "results": [result.to_json() for result in self.results],
        }


def _capture(report: CaptureReport) -> dict[str, Any]:
    return {
        "warm_up_seconds": report.warm_up_seconds,
        "memory_bytes": report.memory_bytes,
        "buckets": [vars(bucket) for bucket in report.buckets],
        "failed": {str(bucket): reason for bucket, reason in report.failed.items()},
    }
