"""The mechanism against padded eager, bit by bit.

Shape letters: R real tokens, B requests, D model dim, V vocabulary.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from bcg_harness.budgets import Comparison, bit_equal
from bcg_harness.checks.check import Check, Condition, has_requests
from bcg_harness.checks.record import StepRecord
from bcg_harness.wrong_rows import NotFinite


def _finite(record: StepRecord) -> Iterator[str]:
    """Demand numbers: NaN has the same bits both ways, and would pass for right where no reference is asked for."""
    if wrong := NotFinite.of(record.replay.hidden_RD):
        yield f"hidden states of the replay: {wrong.describe(None)}"


def _same_bits(what: str, pair: Callable[[StepRecord], tuple[Tensor, Tensor]]) -> Condition:
    """Return the condition that ``pair`` has the same bits, where the backend is deterministic."""

    def condition(record: StepRecord) -> Iterator[str]:
        if record.capabilities.deterministic and not bit_equal(*pair(record)):
            yield f"{what} differ"

    return condition


def _two_replays(record: StepRecord) -> Iterator[str]:
    pair = record.replay.hidden_RD, (record.judged or record.replay).hidden_RD
    if record.capabilities.deterministic and not bit_equal(*pair):
        yield (
            "hidden states of two replays differ: something is kept from one to the next, or a kernel is not "
            "deterministic, which deterministic=False declares"
        )


def _noise(record: StepRecord) -> Comparison | None:
    """Hold a backend that declares itself non-deterministic to its budget instead."""
    if record.capabilities.deterministic:
        return None
    rows = record.padded.hidden_RD.split(record.batch.new_lens)
    return record.compare_requests(record.replay.hidden_RD, rows)


BIT_EQUAL = Check(
    name="bit_equal",
    applies=has_requests,
    conditions={
        "finite": _finite,
        "two replays": _two_replays,
        "hidden states": _same_bits(
            "hidden states of replay and padded eager",
            lambda record: (record.replay.hidden_RD, record.padded.hidden_RD),
        ),
        "logits": _same_bits(
            "logits of replay and padded eager",
            lambda record: (record.replay.logits_BV, record.padded.logits_BV),
        ),
        "KV cache": _same_bits(
            "KV caches of replay and padded eager",
            lambda record: (record.kv_replay[:, :, 1:], record.kv_padded[:, :, 1:]),
        ),
    },
    comparison=_noise,
)
"""Compare replay with padded eager: finite hidden states, logits, the KV cache but page 0; and two replays.

Page 0 takes the keys of all padded rows in one slot, in no fixed order.
"""
