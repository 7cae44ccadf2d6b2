"""Replay against references that are independent of the bucket, or of all that is run.

Shape letters: B requests, V vocabulary.
"""

from collections.abc import Iterator

from bcg_harness.budgets import Comparison, bit_equal
from bcg_harness.checks.check import Check, has_requests
from bcg_harness.checks.record import StepRecord


def _raw(record: StepRecord) -> Comparison | None:
    if record.raw is None:
        return None
    rows = record.raw.hidden_RD.split(record.batch.new_lens)
    return record.compare_requests(record.replay.hidden_RD, rows)


def _expected(record: StepRecord) -> Comparison:
    return record.compare_requests(record.replay.hidden_RD, record.expected)


def _last_tokens(record: StepRecord) -> Iterator[str]:
    last = [stop - 1 for stop in record.batch.cu_new_lens[1:]]
    logits_BV = record.model.compute_logits(record.replay.hidden_RD[last])
    if not bit_equal(logits_BV, record.replay.logits_BV):
        yield "logits are not those of the last tokens"


RAW_SHAPE = Check(
    name="raw_shape",
    applies=lambda record: has_requests(record) and record.raw is not None,
    comparison=_raw,
)
"""Compare replay with eager at the raw shape, which has no padded rows to get wrong."""

ORACLE = Check(
    name="oracle",
    applies=has_requests,
    conditions={"last tokens": _last_tokens},
    comparison=_expected,
)
"""Compare replay with the reference over the full history, and logits with those of each last token."""
