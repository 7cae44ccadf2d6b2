"""What a runner reports: results of a prefill, its captures, and what it did so far.

Shape letters: R real tokens, B requests, D model dim, V vocabulary.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from bcg_core.buckets import Admission


class Mode(Enum):
    """Choose how a prefill is executed."""

    BREAKABLE = "breakable"
    """Replay the bucket's segments; eager, with the reason counted, where no bucket serves the batch."""
    PADDED_EAGER = "padded_eager"
    """Run the same work at the same padded shape without a graph."""
    EAGER = "eager"
    """Run at the raw shape, without padding."""


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """Hold what a prefill computed.

    Attributes:
        hidden_RD: normalised hidden states of the real rows; a view that the runner's next call overwrites, whichever
            thread it comes from.
        logits_BV: logits of each request's last token; the caller's own.
        next_tokens_B: int64, what the sampler chose; the caller's own.
        admission: the bucket that was replayed, or why it ran eagerly.
        padded_tokens: T, rows that were computed.
    """

    hidden_RD: Tensor
    logits_BV: Tensor
    next_tokens_B: Tensor
    admission: Admission
    padded_tokens: int


@dataclass(frozen=True, kw_only=True)
class CapturedBucket:
    """Describe one captured bucket.

    Attributes:
        bucket: T, padded tokens.
        segments: recorded segments.
        breaks: recorded breaks.
        seconds: wall-clock time of the capture.
        memory_bytes: by how much this capture made the engine's device memory grow; a bucket that fits into what larger
            ones left costs nothing.
    """

    bucket: int
    segments: int
    breaks: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """Describe what ``PrefillRunner.capture`` did.

    Attributes:
        buckets: what was captured, largest first.
        failed: buckets that did not fit into memory, with the reason.
        warm_up_seconds: wall-clock time spent before the first capture.
        memory_bytes: device bytes held by all segments together.
    """

    buckets: tuple[CapturedBucket, ...]
    failed: dict[int, str]
    warm_up_seconds: float
    memory_bytes: int


@dataclass
class RunnerStats:
    """Count what a runner did since it was made.

    Attributes:
        replays: replays of each bucket.
        fallbacks: eager prefills in breakable mode, by reason.
        requested: prefills in the other modes, by mode.
        failures: prefills that had their turn and raised, by type and place: "BatchError before the forward",
            "RuntimeError in replay".
        dropped_backends: backends that were kept and are no longer, by name.
    """

    replays: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    requested: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    dropped_backends: Counter[str] = field(default_factory=Counter)
