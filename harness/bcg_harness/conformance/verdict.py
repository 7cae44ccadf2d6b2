"""What one test of the kit says, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bcg_core import BackendError, Capabilities
from bcg_harness.outcome import CheckResult, Outcome

_CAPABILITIES = frozenset(field.name for field in fields(Capabilities))
_FRAMES = 3
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

    @classmethod
    def of_whole(cls, result: CheckResult) -> "Verdict":
        """Judge by a result that stands for all checks of a case or of a backend: a skip, or something raised."""
        place = result.backend if result.case is None else f"{result.backend}, case {result.case}"
        if result.step is not None:
            place += f", step {result.step}"
        reason = f"{place}: {result.detail}"
        if result.traceback is not None:
            reason += f"\n{essence(result.traceback)}"
        declared = result.detail.partition(":")[0] in _CAPABILITIES
        return cls(outcome=result.outcome, reason=reason, declared=declared, results=(result,))

    @classmethod
    def skip(cls, backend: str, error: BackendError, *, declared: bool) -> "Verdict":
        """Skip all tests of ``backend``, which cannot be made for this model."""
        result = CheckResult(outcome=Outcome.SKIPPED, backend=backend, detail=str(error))
        return cls(
            outcome=result.outcome, reason=result.detail, declared=declared, results=(result,)
        )

    @classmethod
    def of_steps(cls, results: Sequence[CheckResult], *, meaning: str) -> "Verdict":
        """Judge by what one check found in the steps of a case; ``meaning`` says what it stands for."""
        bad = [result for result in results if result.outcome.is_bad]
        if not results:
            return cls(outcome=Outcome.SKIPPED, reason="nothing to check in this case")
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
    """Return the innermost frames of what was raised first in a formatted traceback, and what that was."""
    first = traceback.partition(_CHAINED)[0].rstrip()
    head, *frames = first.split('\n  File "')
    return "\n".join(f'  File "{frame}' for frame in frames[-_FRAMES:]) or head
