"""What a replay leaves in rows that no request owns.

Shape letters: T bucket (padded) tokens, R real tokens, M rows of the boundary buffers, X a fused row of heads.
"""

from collections.abc import Iterator

from bcg_harness.checks.check import Check
from bcg_harness.checks.record import StepRecord
from bcg_harness.wrong_rows import NotFinite


def _finite(record: StepRecord) -> Iterator[str]:
    real = record.batch.num_tokens
    wrong = NotFinite.of(record.replay.hidden_TD[real:])
    if wrong is not None:
        first = real + wrong.first
        yield f"{wrong.count} of {wrong.rows} padded rows are not finite in hidden states, first row {first}"


def _ids(record: StepRecord) -> Iterator[str]:
    ids, _, _ = record.replay.padded_inputs
    if ids.any():
        yield "token ids of padded rows hold what an earlier batch left there"


def _positions(record: StepRecord) -> Iterator[str]:
    _, positions, _ = record.replay.padded_inputs
    if positions.any():
        yield "positions of padded rows hold what an earlier batch left there"


def _slots(record: StepRecord) -> Iterator[str]:
    _, _, slots = record.replay.padded_inputs
    if (slots // record.batch.page_size).any():
        yield "slots of padded rows hold what an earlier batch left there"


def _output_zero(record: StepRecord) -> Iterator[str]:
    if record.replay.out_MX[record.batch.num_tokens : record.bucket].any():
        yield "attention output of padded rows is not zero: not cleared, or written by the backend"


def _output_beyond(record: StepRecord) -> Iterator[str]:
    if not record.replay.out_MX[record.bucket :].isnan().all():
        yield "attention output beyond the bucket was written"


PADDING = Check(
    name="padding",
    applies=lambda record: record.bucket is not None,
    conditions={
        "finite": _finite,
        "ids": _ids,
        "positions": _positions,
        "slots": _slots,
        "output zero": _output_zero,
        "output beyond": _output_beyond,
    },
)
"""Check that padded rows are finite, hold nothing of an earlier batch, and were not touched by the backend."""
