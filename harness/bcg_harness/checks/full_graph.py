"""Replays of full graphs, attention included, of backends that declare that they can be captured."""

from collections.abc import Iterator
from dataclasses import replace

from bcg_harness.budgets import Comparison
from bcg_harness.checks.check import Check
from bcg_harness.checks.kv_isolation import others_kept
from bcg_harness.checks.record import StepRecord
from bcg_harness.full_graph import FullReplay


def _full(record: StepRecord) -> FullReplay:
    assert record.full is not None, "applies() has seen to that"
    return record.full


def _refused(record: StepRecord) -> str | None:
    return _full(record).refused


def _replayed(record: StepRecord) -> Iterator[str]:
    error = _full(record).error
    if error is not None:
        yield error


def _others_kept(record: StepRecord) -> Iterator[str]:
    kv_after = _full(record).kv_after
    if kv_after is not None:
        yield from others_kept(replace(record, kv_replay=kv_after))


def _expected(record: StepRecord) -> Comparison | None:
    hidden_RD = _full(record).hidden_RD
    return None if hidden_RD is None else record.compare_requests(hidden_RD, record.expected)


FULL_GRAPH = Check(
    name="full_graph",
    applies=lambda record: record.full is not None,
    skipped=_refused,
    conditions={"replayed": _replayed, "others kept": _others_kept},
    comparison=_expected,
)
"""Compare a replay of a full graph with the reference over the full history, and check that it keeps foreign slots."""
