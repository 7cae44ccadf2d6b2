"""The checks of one step: each judges what the arms of the step did, and answers for one kind of fault.

Shape letters: T padded tokens, R real tokens, L layers, P pages, S slots, K KV heads, H head dim.

Three references are kept apart: ``bit_equal`` judges the mechanism against padded eager, ``raw_shape`` the padding
against eager without any, ``oracle`` and ``attention`` everything against independent computations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from bcg_core import Capabilities, PrefillBatch, PrefillModel, PrefillRunner
from bcg_harness.budgets import Comparison, Errors, bit_equal, compare, judge, worst
from bcg_harness.cases import Step
from bcg_harness.outcome import Finding
from bcg_harness.stage import Arm


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """Hold what the arms of one checked step did, all from the same KV cache.

    Attributes:
        step: what was asked for.
        batch: as it was run.
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
        kv_before: storage that every arm started from.
        kv_padded: storage after ``padded``.
        kv_replay: storage after ``replay``.
    """

    step: Step
    batch: PrefillBatch
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
    kv_before: Tensor
    kv_padded: Tensor
    kv_replay: Tensor

    def compare_requests(self, actual_RD: Tensor, expected: Sequence[Tensor]) -> Comparison:
        """Compare hidden states request by request, with budgets from the reference; returns the worst."""
        rows = zip(actual_RD.split(self.batch.new_lens), expected, self.low, strict=True)
        return worst(
            compare(actual, should_be, low=low, what=f"request {number}")
            for number, (actual, should_be, low) in enumerate(rows)
        )


def check_bit_equal(record: StepRecord) -> Finding | None:
    """Compare replay with padded eager, bit by bit: hidden states, logits and the whole KV cache but page 0.

    Page 0 takes the keys of all padded rows in one slot, in no fixed order. A backend that declares itself
    non-deterministic is held to its budget instead.
    """
    replay, padded = record.replay, record.padded
    if not record.batch.num_requests:
        return None
    if not record.capabilities.deterministic:
        rows = padded.hidden_RD.split(record.batch.new_lens)
        return Finding.of("bit_equal", record.compare_requests(replay.hidden_RD, rows))
    compared = {
        "hidden states of replay and padded eager": (replay.hidden_RD, padded.hidden_RD),
        "logits of replay and padded eager": (replay.logits_BV, padded.logits_BV),
        "KV caches of replay and padded eager": (
            record.kv_replay[:, :, 1:],
            record.kv_padded[:, :, 1:],
        ),
    }
    if record.judged is not None:
        compared["hidden states of two replays"] = replay.hidden_RD, record.judged.hidden_RD
    differing = [what for what, (ours, theirs) in compared.items() if not bit_equal(ours, theirs)]
    return Finding.listing("bit_equal", [f"{what} differ" for what in differing])


def check_raw_shape(record: StepRecord) -> Finding | None:
    """Compare replay with eager at the raw shape, which has no padded rows to get wrong."""
    if not record.batch.num_requests or record.raw is None:
        return None
    rows = record.raw.hidden_RD.split(record.batch.new_lens)
    return Finding.of("raw_shape", record.compare_requests(record.replay.hidden_RD, rows))


def check_oracle(record: StepRecord) -> Finding | None:
    """Compare replay with the reference over the full history, and logits with those of each last token."""
    if not record.batch.num_requests:
        return None
    finding = Finding.of(
        "oracle",
        record.compare_requests(record.replay.hidden_RD, record.expected),
    )
    last = [stop - 1 for stop in record.batch.cu_new_lens[1:]]
    logits_BV = record.model.compute_logits(record.replay.hidden_RD[last])
    if finding.passed and not bit_equal(logits_BV, record.replay.logits_BV):
        return Finding(
            check="oracle", passed=False, detail="logits are not those of the last tokens"
        )
    return finding


def check_attention(record: StepRecord) -> Finding | None:
    """Judge every layer's attention, as computed during a replay, by its definition on the same inputs."""
    if not record.batch.num_requests or record.judged is None:
        return None
    trace = record.judged.trace
    if trace.input_problems:
        return Finding.listing("attention", trace.input_problems)
    if not trace.measured:
        return Finding(check="attention", passed=False, detail="the backend was never called")
    return Finding.of("attention", judge(trace.measured))


def check_structure(record: StepRecord) -> Finding:
    """Check what was captured and what was run: segments, breaks, admission, counters, calls of model and backend."""
    return Finding.listing(
        "structure",
        [*_capture_problems(record), *_dispatch_problems(record), *_backend_problems(record)],
    )


def check_kv_isolation(record: StepRecord) -> Finding:
    """Check that the replay wrote to the batch's slots, and changed no other slot outside page 0."""
    slots = record.batch.slot_mapping_R.to(record.kv_replay.device)
    before, after = (storage.flatten(2, 3) for storage in (record.kv_before, record.kv_replay))
    expected = before.clone()
    expected[:, :, slots] = after[:, :, slots]
    page = record.batch.page_size
    problems = []
    if not bit_equal(expected[:, :, page:], after[:, :, page:]):
        changed = (expected != after).flatten(3).any(-1).any(1).any(0)
        changed[:page] = False
        found = changed.nonzero().flatten().tolist()
        problems.append(f"KV slots outside the batch changed: {found[:8]}")
    unwritten = (before[:, :, slots] == after[:, :, slots]).flatten(3).all(-1)
    if unwritten.any():
        problems.append("the batch's own KV slots were not written in every layer")
    return Finding.listing("kv_isolation", problems)


def check_padding(record: StepRecord) -> Finding | None:
    """Check that padded rows are finite, hold nothing of an earlier batch, and were not touched by the backend."""
    if record.bucket is None:
        return None
    problems = []
    for name, arm in (("replay", record.replay), ("padded eager", record.padded)):
        if not arm.hidden_TD.isfinite().all():
            problems.append(f"{name}: hidden states of padded rows are not finite")
    replay, real = record.replay, record.batch.num_tokens
    ids, _, slots = replay.padded_inputs
    if ids.any() or (slots >= record.batch.page_size).any():
        problems.append("inputs of padded rows hold what an earlier batch left there")
    if replay.out_MX[real : record.bucket].any():
        problems.append(
            "attention output of padded rows is not zero: not cleared, or written by the backend"
        )
    if not replay.out_MX[record.bucket :].isnan().all():
        problems.append("attention output beyond the bucket was written")
    return Finding.listing("padding", problems)


def _capture_problems(record: StepRecord) -> list[str]:
    layers = record.model.spec.num_layers
    problems = []
    for size in record.runner.buckets:
        graph = record.runner.graphs.get(size)
        if graph is None:
            problems.append(f"bucket {size} was not captured")
        elif (len(graph.breaks), len(graph.segments)) != (layers, layers + 1):
            problems.append(
                f"bucket {size} has {len(graph.breaks)} breaks and {len(graph.segments)} segments, "
                f"expected {layers} and {layers + 1}"
            )
    return problems


def _dispatch_problems(record: StepRecord) -> list[str]:
    problems = []
    for arm in filter(None, (record.judged, record.replay)):
        counted = dict(arm.replays), dict(arm.fallbacks)
        if arm.admission.bucket != record.bucket:
            problems.append(f"served by bucket {arm.admission.bucket}, expected {record.bucket}")
        elif record.bucket is not None:
            if counted != ({record.bucket: 1}, {}):
                problems.append(
                    f"counted {counted[0]} replays and {counted[1]} fallbacks for one replay"
                )
            if arm.model_forwards:
                problems.append("the model's Python ran during a replay")
        elif not arm.admission.reason or counted != ({}, {arm.admission.reason: 1}):
            problems.append(f"eager because {arm.admission.reason!r}, but counted {counted[1]}")
    return problems


def _backend_problems(record: StepRecord) -> list[str]:
    """Check that the backend saw the live batch once, and every layer once with the real rows."""
    trace, batch = record.replay.trace, record.batch
    if not batch.num_requests:
        return ["the backend was called for no requests"] if trace.batches or trace.layers else []
    problems = []
    if [id(seen) for seen in trace.batches] != [id(batch)]:
        problems.append(f"metadata was prepared {len(trace.batches)} times, or for another batch")
    layers = list(range(record.model.spec.num_layers))
    if trace.layers != layers:
        problems.append(f"the backend attended to layers {trace.layers}, expected {layers}")
    if set(trace.rows) - {batch.num_tokens}:
        problems.append(f"the backend was given {trace.rows} rows for {batch.num_tokens} tokens")
    return problems


CHECKS: Mapping[str, Callable[[StepRecord], Finding | None]] = MappingProxyType(
    {
        "bit_equal": check_bit_equal,
        "raw_shape": check_raw_shape,
        "oracle": check_oracle,
        "attention": check_attention,
        "structure": check_structure,
        "kv_isolation": check_kv_isolation,
        "padding": check_padding,
    }
)
"""The checks of a step by name; None from a check means that the step has nothing it applies to."""

ONE_PASS = "one_pass"
"""The check of a whole case: a request prefilled in chunks against one pass over all of it."""

CHECK_NAMES = (*CHECKS, ONE_PASS)
"""All names of checks, in the order of tables."""

MECHANISM = ("bit_equal", "structure", "kv_isolation", "padding")
"""The checks that compare replay with padded eager alone: they need no reference, and cost a fraction of all."""

REFERENCED = frozenset({"raw_shape", "oracle", ONE_PASS})
"""The checks whose budgets or expectations come from the reference."""
