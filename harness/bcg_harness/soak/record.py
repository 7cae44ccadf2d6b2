"""What a soak found, with everything needed to have it again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bcg_core import ModelSpec
from bcg_harness.cases import Case
from bcg_harness.environment import Environment, describe_model
from bcg_harness.outcome import CheckResult
from bcg_harness.soak.samples import Samples


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Hold a batch with which something went wrong.

    Attributes:
        batch: its number in the run.
        replays: how many came before it.
        results: what failed, or what was raised.
        case: all batches since no sequence was alive, the last of which failed; other backends had their turns in it.
    """

    batch: int
    replays: int
    results: tuple[CheckResult, ...]
    case: Case

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "batch": self.batch,
            "replays": self.replays,
            "results": [result.to_json() for result in self.results],
            "case": self.case.to_json(),
        }


@dataclass(kw_only=True)
class Tally:
    """Count what was served, as the run goes on.

    Attributes:
        batches: batches served, checked ones included.
        replays: those of them that a bucket had to serve.
        buckets: replays by bucket, as they had to be.
        turns: batches by backend.
        checked: batches that were compared with padded eager and passed, by backend.
        sequences: sequences that ended, and gave their pages back.
        unusable: backends that could not be used, and why.
        failure: what ended the run early.
        grown: types of which Python holds more objects at the end than after settling, with how many.
    """

    batches: int = 0
    replays: int = 0
    buckets: Counter[int] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    sequences: int = 0
    unusable: list[CheckResult] = field(default_factory=list)
    failure: Failure | None = None
    grown: Counter[str] = field(default_factory=Counter)

    def miscount(self, counted: Mapping[int, int]) -> str | None:
        """Say where a runner has ``counted`` less, more or other replays than there were batches for buckets."""
        differing = [
            f"{counted.get(size, 0)} of bucket {size} instead of {self.buckets[size]}"
            for size in sorted({*counted, *self.buckets})
            if counted.get(size, 0) != self.buckets[size]
        ]
        if not differing:
            return None
        return f"the runner counted other replays than were due: {', '.join(differing)}"


@dataclass(frozen=True, kw_only=True)
class SoakReport:
    """Hold a finished run and its context.

    Attributes:
        environment: where it ran.
        spec: shape of the model.
        settings: whatever was chosen.
        buckets: what was captured.
        tally: what was served.
        fallbacks: eager prefills by reason, as the runner counted them.
        samples: all readings.
        missing: quantities that cannot be read here, with the reason.
        planned: how many replays were asked for.
        seconds: wall-clock time of serving, checks and readings included.
        interrupted: whether somebody stopped it.
    """

    environment: Environment
    spec: ModelSpec
    settings: Mapping[str, Any]
    buckets: Sequence[int]
    tally: Tally
    fallbacks: Mapping[str, int]
    samples: Samples
    missing: Mapping[str, str]
    planned: int
    seconds: float
    interrupted: bool

    @property
    def is_green(self) -> bool:
        """Tell whether all was served, batches of every backend were checked and right, and nothing grew."""
        tally, growths = self.tally, self.samples.growths()
        checked = bool(tally.turns) and all(tally.checked[label] for label in tally.turns)
        complete = tally.replays >= self.planned and not self.interrupted and checked
        bad = tally.failure or any(result.outcome.is_bad for result in tally.unusable)
        return complete and not bad and bool(growths) and all(each.within for each in growths)

    @property
    def replays_per_second(self) -> float:
        """Return how many replays there were in a second, with all that is done around them."""
        return self.tally.replays / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all of it as a JSON object."""
        tally = self.tally
        return {
            "kind": "bcg soak",
            "environment": self.environment.to_json(),
            "model": {"name": self.settings["model"], **describe_model(self.spec)},
            "settings": dict(self.settings),
            "buckets": list(self.buckets),
            "summary": {
                "green": self.is_green,
                "interrupted": self.interrupted,
                "replays_planned": self.planned,
                "replays": tally.replays,
                "batches": tally.batches,
                "sequences": tally.sequences,
                "seconds": round(self.seconds, 3),
                "replays_per_second": round(self.replays_per_second, 2),
            },
            "growth": [growth.to_json() for growth in self.samples.growths()],
            "missing": dict(self.missing),
            "grown_types": dict(tally.grown),
            "replays_by_bucket": {str(bucket): tally.buckets[bucket] for bucket in self.buckets},
            "fallbacks": dict(self.fallbacks),
            "batches_by_backend": dict(tally.turns),
            "checked": dict(tally.checked),
            "unusable": [result.to_json() for result in tally.unusable],
            "failure": None if tally.failure is None else tally.failure.to_json(),
            "samples": self.samples.to_json(),
        }
