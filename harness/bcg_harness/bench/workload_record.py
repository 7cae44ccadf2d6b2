"""What a bench ran, as its result describes it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkloadRecord:
    """Describe a workload that was measured.

    Attributes:
        name: in tables and ``--workload``.
        description: in words.
        steps: timed batches; of each the (prefix, new tokens) of its requests.
        left_out: requests that are in no batch, as they are longer than the context.
        cut: requests that were cut to the context.
    """

    name: str
    description: str
    steps: tuple[tuple[tuple[int, int], ...], ...]
    left_out: int = 0
    cut: int = 0

    @property
    def real_tokens(self) -> int:
        """Return the new tokens of all timed batches."""
        return sum(new for step in self.steps for _, new in step)
