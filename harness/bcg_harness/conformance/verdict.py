"""What one test of the kit says, and why."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from bcg_harness.outcome import CheckResult, Outcome

_FRAMES = 3
_MAKING = re.compile(
    r'  File "(<frozen |.*/importlib/|.*/inspect\.py"|.*/bcg_core/(registry|text_options)\.py")'
)
_CHAINED = "\nThe above exception was the direct cause of the following exception:\n"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hold the outcome of one test.

    Attributes:
        outcome: what becomes of the test.
        reason: of anything but a pass; may have several lines.
        declared: of a skip, whether the backend declares the limit; the environment is the reason otherwise.
        results: what it was judged from, for reports.
    """

    outcome: Outcome
    reason: str = ""
    declared: bool = False
    results: tuple[CheckResult, ...] = ()

    @property
    def broken_backend(self) -> str | None:
        """Return the backend where an error keeps it from being used at all; None otherwise."""
        whole = self.outcome is Outcome.ERROR and self.results and self.results[0].case is None
        return self.results[0].backend if whole else None

    @classmethod
    def of_whole(cls, result: CheckResult) -> "Verdict":
        """Judge by a result that stands for all checks of a case or of a backend: a skip, or something raised."""
        place = result.backend if result.case is None else f"{result.backend}, case {result.case}"
        if result.step is not None:
            place += f", step {result.step}"
        reason = f"{place}: {result.detail}"
        if result.traceback is not None:
            reason += f"\n{essence(result.traceback)}"
        return cls(
            outcome=result.outcome, reason=reason, declared=result.declared, results=(result,)
        )

    @classmethod
    def of_steps(cls, results: Sequence[CheckResult], *, meaning: str) -> "Verdict":
        """Judge by what one check found in the steps of a case; ``meaning`` says what it stands for."""
        bad = [result for result in results if result.outcome.is_bad]
        if not results:
            return cls(outcome=Outcome.SKIPPED, reason="nothing to check in this case")
        if all(result.outcome is Outcome.SKIPPED for result in results):
            return cls.of_whole(results[0])
        if not bad:
            return cls(outcome=Outcome.PASSED, results=tuple(results))
        unjudged = all(result.outcome is Outcome.ERROR for result in bad)
        places = ("whole case" if r.step is None else f"step {r.step}" for r in bad)
        lines = [f"{place}: {r.detail}" for place, r in zip(places, bad, strict=True)]
        return cls(
            outcome=Outcome.ERROR if unjudged else Outcome.FAILED,
            reason="\n".join([f"must hold: {meaning}", *lines]),
            results=tuple(results),
        )


def essence(traceback: str) -> str:
    """Return the innermost frames of what was raised first in a formatted traceback, and what that was.

    Frames that only import or make a backend are left out: they say nothing of it.
    """
    lines = traceback.partition(_CHAINED)[0].rstrip().split("\n")
    frames: list[list[str]] = []
    raised: list[str] = []
    for line in lines:
        if line.startswith('  File "') and not raised:
            frames.append([line])
        elif frames and line.startswith("  ") and not raised:
            frames[-1].append(line)
        elif frames:
            raised.append(line)
    kept = [frame for frame in frames if not _MAKING.match(frame[0])]
    return "\n".join([*chain.from_iterable(kept[-_FRAMES:]), *(raised or lines)])
