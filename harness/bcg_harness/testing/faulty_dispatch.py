"""Runners that serve a batch by another bucket, row count or weight than they should, or say so.

Shape letters: T bucket (padded) tokens, R real tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bcg_core import (
    Admission,
    CaptureReport,
    ForwardContext,
    Metadata,
    Mode,
    Phase,
    PrefillBatch,
    PrefillResult,
    PrefillRunner,
    StaticInputs,
    TokenBuckets,
    Workspace,
)


class PlansForPaddedCount(PrefillRunner):
    """Have the backend plan for all T rows of the bucket, padded ones included."""

    def _prepare(self, batch: PrefillBatch, admission: Admission) -> Metadata:
        padded = admission.bucket or batch.num_tokens
        return super()._prepare(PrefillBatch.scratch([padded], self.kv_cache), admission)


class PlansForNobody(PrefillRunner):
    """Have the backend plan for a batch without requests."""

    def prefill(self, batch: PrefillBatch, **kwargs: Any) -> PrefillResult:
        """Plan, whoever is there."""
        if not batch.num_requests:
            self.backend.init_forward_metadata(batch)
        return super().prefill(batch, **kwargs)


class SkipsFullBucket(PrefillRunner):
    """Compare with less than where less or equal is meant: a batch that fills a bucket gets the next."""

    def admit(self, batch: PrefillBatch) -> Admission:
        """Ask for one row too many."""
        return TokenBuckets(sorted(self.graphs)).select(batch.num_tokens + 1)


class _ShortWorkspace(Workspace):
    def load(self, batch: PrefillBatch, inputs: StaticInputs) -> None:
        """Load, and lose what is in the very last row."""
        super().load(batch, inputs)
        if len(inputs.slot_mapping_T) == self.max_tokens:
            inputs.slot_mapping_T[-1:].zero_()


class LosesLastRow(PrefillRunner):
    """Write the keys of the last row of the largest bucket to the reserved page: wrong only where it is a real row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.workspace = _ShortWorkspace(self.model.spec, self.buckets[-1])


class ReplacesWeights(PrefillRunner):
    """Put another tensor in the place of a weight after the capture, whose segments go on reading the old one."""

    def capture(self, progress: Callable[[int, int], None] | None = None) -> CaptureReport:
        """Capture, then replace the last norm of the Llama that is run."""
        report = super().capture(progress)
        model: Any = self.model
        while hasattr(model, "inner"):
            model = model.inner
        model.weights = replace(model.weights, norm_D=model.weights.norm_D * 1.5)
        return report


class DropsBucket(PrefillRunner):
    """Lose the smallest bucket after the capture, and serve its batches by a larger one."""

    def capture(self, progress: Callable[[int, int], None] | None = None) -> CaptureReport:
        """Capture, and forget."""
        report = super().capture(progress)
        del self.graphs[min(self.graphs)]
        self._captured = TokenBuckets(sorted(self.graphs))
        return report


class CountsTwice(PrefillRunner):
    """Count every replay twice."""

    def prefill(self, batch: PrefillBatch, **kwargs: Any) -> PrefillResult:
        """Prefill, and count again."""
        result = super().prefill(batch, **kwargs)
        if result.admission.bucket is not None:
            self.stats.replays[result.admission.bucket] += 1
        return result


class CountsNoReason(PrefillRunner):
    """Count fallbacks, but not why."""

    def _count(self, mode: Mode, admission: Admission) -> None:
        if mode is Mode.BREAKABLE and admission.bucket is None:
            admission = Admission.eager("something")
        super()._count(mode, admission)


class GivesNoReason(PrefillRunner):
    """Fall back, and do not say why."""

    def admit(self, batch: PrefillBatch) -> Admission:
        """Leave the reason out."""
        admission = super().admit(batch)
        return Admission.eager("") if admission.bucket is None else admission


class _GenerousContext(ForwardContext):
    def bind(self, batch: PrefillBatch, backend: Any, metadata: Any) -> None:
        """Bind, and give a replay's backend all T rows."""
        super().bind(batch, backend, metadata)
        if self.phase is Phase.REPLAY:
            self.real = self.io


class GivesPaddedRows(PrefillRunner):
    """Give the backend the padded rows of the bucket, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context = _GenerousContext(self.kv_cache)
