"""What the arms of one checked step did.

Shape letters: R real tokens, D model dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from bcg_core import Capabilities, PrefillBatch, PrefillModel, PrefillRunner
from bcg_harness.budgets import Comparison, Errors, Measured, compare, worst
from bcg_harness.cases import Step
from bcg_harness.full_graph import FullReplay
from bcg_harness.interleaving import Interleaving
from bcg_harness.stage import Arm


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """Hold what the arms of one checked step did, all from the same KV cache.

    Attributes:
        step: what was asked for.
        batch: as it was run, and as the arms left it.
        made: a copy of the batch from before it was run.
        expected: reference hidden states of each request, ``[R, D]``.
        low: errors of the low-precision reference on as many rows as each request has.
        bucket: that should have served the batch; None for eager.
        capabilities: of the backend.
        model: its head gives the logits.
        runner: what was captured.
        raw: eager at the raw shape; None when nobody asked for ``raw_shape``.
        padded: eager at the bucket's shape.
        judged: a replay whose attention was compared with the oracle; None when nobody asked for ``attention``.
        replay: a replay left alone.
        sharp: errors of one layer's attention on logits as large as trained models have; empty when nobody asked for
            ``attention``.
        interleaving: one layer's attention with other batches in between; None when nobody asked for ``interleaved``.
        full: a replay of a full graph; None where the backend declares none, and when nobody asked for ``full_graph``.
        kv_before: storage that every arm started from.
        kv_padded: storage after ``padded``.
        kv_replay: storage after ``replay``.
    """

    step: Step
    batch: PrefillBatch
    made: PrefillBatch
    expected: tuple[Tensor, ...]
    low: tuple[Errors, ...]
    bucket: int | None
    capabilities: Capabilities
    model: PrefillModel
    runner: PrefillRunner
    raw: Arm | None
    padded: Arm
    judged: Arm | None
    replay: Arm
    sharp: tuple[Measured, ...]
    interleaving: Interleaving | None
    full: FullReplay | None
    kv_before: Tensor
    kv_padded: Tensor
    kv_replay: Tensor

    def served(self) -> Iterator[Arm]:
        """Yield the arms that asked for breakable mode."""
        yield from filter(None, (self.judged, self.replay))

    def compare_requests(self, actual_RD: Tensor, expected: Sequence[Tensor]) -> Comparison:
        """Compare hidden states request by request, with budgets from the reference; returns the worst."""
        batch = self.batch
        rows = zip(
            actual_RD.split(batch.new_lens), expected, self.low, batch.prefix_lens, strict=True
        )
        return worst(
            compare(actual, should_be, low=low, what=f"request {number}", position=position)
            for number, (actual, should_be, low, position) in enumerate(rows)
        )
