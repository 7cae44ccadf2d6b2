"""What a run of random compositions found, with everything needed to have it again."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcg_core import ModelSpec, TokenBuckets
from bcg_harness.cases import Case
from bcg_harness.environment import Environment, describe_model
from bcg_harness.outcome import CheckResult, Outcome


def failed_checks(results: Iterable[CheckResult]) -> list[str]:
    """Return the names of checks in ``results``, each once, and ``error`` for what was raised."""
    return list(dict.fromkeys(result.check or "error" for result in results))


@dataclass(frozen=True, kw_only=True)
class Counterexample:
    """Hold a composition that failed with one backend.

    Attributes:
        backend: label of the backend.
        case: the shrunk case; fails alone on a fresh runner if ``reproduced``.
        drawn: the case as it was drawn.
        buckets: what was captured.
        page_size: tokens a KV page.
        results: what failed, on the shrunk case if it was reproduced.
        reproduced: whether it failed again on a fresh runner, alone or behind the cases before it.
    """

    backend: str
    case: Case
    drawn: Case
    buckets: TokenBuckets
    page_size: int
    results: tuple[CheckResult, ...]
    reproduced: bool

    @property
    def checks(self) -> list[str]:
        """Return what failed."""
        return failed_checks(self.results)

    def command(self, path: Path, settings: Mapping[str, Any]) -> str:
        """Return the command that replays ``case`` from the file ``path``."""
        options = {
            "case": path,
            "backend": self.backend,
            "buckets": ",".join(map(str, self.buckets)),
            "page-size": self.page_size,
            **{name: settings[name] for name in ("model", "device", "dtype", "seed")},
        }
        words = (f"--{name} {shlex.quote(str(value))}" for name, value in options.items())
        return f"bcg check {' '.join(words)}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "backend": self.backend,
            "checks": self.checks,
            "reproduced": self.reproduced,
            "buckets": list(self.buckets),
            "page_size": self.page_size,
            "case": self.case.to_json(),
            "drawn": self.drawn.to_json(),
            "results": [result.to_json() for result in self.results],
        }


@dataclass(kw_only=True)
class Tally:
    """Count what became of the cases of a run, as it goes on.

    Attributes:
        finished: cases that are done, with all backends.
        steps: batches that were checked, all backends together.
        outcomes: results by outcome.
        passed: cases that passed, by backend.
        skipped: why something was skipped, as (backend, reason), and how often.
        errors: backends that could not be used at all.
        counterexamples: what failed.
        lost: why the run ended early; None when it did not.
    """

    finished: int = 0
    steps: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: list[CheckResult] = field(default_factory=list)
    counterexamples: list[Counterexample] = field(default_factory=list)
    lost: str | None = None


@dataclass(frozen=True, kw_only=True)
class FuzzReport:
    """Hold a finished run and its context.

    Attributes:
        environment: where it ran.
        spec: shape of the model.
        settings: whatever was chosen.
        tally: what became of the cases.
        planned: how many cases were asked for.
        seconds: wall-clock time of the cases, captures and references included.
        interrupted: whether somebody stopped it.
    """

    environment: Environment
    spec: ModelSpec
    settings: Mapping[str, Any]
    tally: Tally
    planned: int
    seconds: float
    interrupted: bool

    @property
    def is_green(self) -> bool:
        """Tell whether all cases were run, some passed, and nothing failed."""
        tally = self.tally
        return bool(tally.passed) and not (
            tally.counterexamples or tally.errors or tally.lost or self.interrupted
        )

    @property
    def cases_per_second(self) -> float:
        """Return how many cases were finished in a second, all backends together."""
        return self.tally.finished / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all of it as a JSON object."""
        tally = self.tally
        return {
            "kind": "bcg fuzz",
            "environment": self.environment.to_json(),
            "model": {"name": self.settings["model"], **describe_model(self.spec)},
            "settings": dict(self.settings),
            "summary": {
                "green": self.is_green,
                "interrupted": self.interrupted,
                "ended": tally.lost,
                "cases_planned": self.planned,
                "cases_finished": tally.finished,
                "steps_checked": tally.steps,
                "seconds": round(self.seconds, 3),
                "cases_per_second": round(self.cases_per_second, 2),
                **{outcome.value: tally.outcomes[outcome] for outcome in Outcome},
            },
            "passed": dict(tally.passed),
            "skipped": [
                {"backend": backend, "reason": reason, "times": times}
                for (backend, reason), times in tally.skipped.items()
            ],
            "errors": [result.to_json() for result in tally.errors],
            "counterexamples": [found.to_json() for found in tally.counterexamples],
        }
