"""What it takes to make a mode ready. Times are seconds, sizes bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class BucketRecord:
    """Hold one captured bucket of a mode.

    Attributes:
        bucket: T, padded tokens.
        segments: recorded segments.
        breaks: recorded breaks.
        seconds: time of the capture.
        memory_bytes: by how much it made the graphs' memory grow.
    """

    bucket: int
    segments: int
    breaks: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModeSetup:
    """Hold what it took to make a mode ready for a backend.

    Attributes:
        backend: label of the backend; ``NO_BACKEND`` where one set-up serves all.
        mode: name of the mode.
        warm_up_seconds: before the first capture: compilation and first calls.
        capture_seconds: of all buckets.
        graph_memory: device memory that graphs hold; None where it is not known.
        buckets: what was captured, largest first; empty for modes that capture lazily or not at all.
        failed: buckets that could not be captured, with the reason.
    """

    backend: str
    mode: str
    warm_up_seconds: float = 0.0
    capture_seconds: float = 0.0
    graph_memory: int | None = None
    buckets: tuple[BucketRecord, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)
