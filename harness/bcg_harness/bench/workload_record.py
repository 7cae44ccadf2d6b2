"""What a bench ran, as its result describes it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkloadRecord:
    """Describe a workload that was measured.

    Attributes:
        name: in tables and ``--workload``.
        description: in words.
        steps: timed batches; of each the (prefix, new tokens) of its requests.
    """

    name: str
    description: str
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def real_tokens(self) -> int:
        """Return the new tokens of all timed batches."""
        return sum(new for step in self.steps for _, new in step)
