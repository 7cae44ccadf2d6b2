"""What the author of a backend declares as known to fail."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bcg_harness.candidates import Candidate
from bcg_harness.errors import HarnessError


@dataclass(frozen=True, kw_only=True)
class ExpectedFailure:
    """Hold a pattern over ``check-case`` and the reason why what it matches fails."""

    pattern: str
    reason: str

    def matches(self, check: str, case: str) -> bool:
        """Tell whether ``check`` of ``case`` is among what is expected to fail."""
        return fnmatchcase(f"{check}-{case}", self.pattern)


def expected_failures(candidate: Candidate) -> tuple[ExpectedFailure, ...]:
    """Return what ``candidate`` declares; raises HarnessError for anything but patterns with reasons."""
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


def first_match(
    expected: Iterable[ExpectedFailure], check: str, case: str
) -> ExpectedFailure | None:
    """Return the first of ``expected`` that matches ``check`` of ``case``; None when it has to pass."""
    return next((known for known in expected if known.matches(check, case)), None)
