"""What a replay does to the KV cache.

Shape letters: L layers, S slots of the whole cache, R real tokens, K KV heads, H head dim.
"""

from collections.abc import Iterator

from torch import Tensor

from bcg_harness.budgets import bit_equal, bits
from bcg_harness.checks.check import Check
from bcg_harness.checks.record import StepRecord


def _flat(record: StepRecord) -> tuple[Tensor, Tensor]:
    """Return the storage before and after the replay by flat slot, each ``[L, 2, S, K, H]``."""
    return record.kv_before.flatten(2, 3), record.kv_replay.flatten(2, 3)


def others_kept(record: StepRecord) -> Iterator[str]:
    """Say which slots changed that are neither the batch's nor in page 0."""
    before, after = _flat(record)
    slots, page = record.batch.slot_mapping_R.to(after.device), record.batch.page_size
    expected = before.clone()
    expected[:, :, slots] = after[:, :, slots]
    if not bit_equal(expected[:, :, page:], after[:, :, page:]):
        changed = (bits(expected) != bits(after)).flatten(3).any(-1).any(1).any(0)
        changed[:page] = False
        yield f"KV slots outside the batch changed: {changed.nonzero().flatten().tolist()[:8]}"


def _own_written(record: StepRecord) -> Iterator[str]:
    before, after = _flat(record)
    slots = record.batch.slot_mapping_R.to(after.device)
    # By bits: slots may have held NaN, which equals nothing.
    if (bits(before[:, :, slots]) == bits(after[:, :, slots])).flatten(3).all(-1).any():
        yield "the batch's own KV slots were not written in every layer"


def _reserved_finite(record: StepRecord) -> Iterator[str]:
    """Page tables are padded with page 0: what a kernel loads from there and masks must not turn into NaN."""
    page = record.batch.page_size
    before, after = (storage[:, :, :page] for storage in _flat(record))
    if (before.isfinite() & ~after.isfinite()).any():
        yield "the reserved page 0 of the KV cache is not finite any more"


KV_ISOLATION = Check(
    name="kv_isolation",
    applies=lambda record: True,
    conditions={
        "others kept": others_kept,
        "own written": _own_written,
        "page 0 finite": _reserved_finite,
    },
)
"""Check that the replay wrote to the batch's slots, changed no other slot outside page 0, and left page 0 finite."""
