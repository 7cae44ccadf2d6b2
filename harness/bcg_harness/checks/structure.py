"""What was captured and what was run: breaks, admission, counters, and calls of model and backend."""

from collections.abc import Iterator
from dataclasses import fields

import torch

from bcg_harness.checks.check import Check
from bcg_harness.checks.record import StepRecord


def _captured(record: StepRecord) -> Iterator[str]:
    for size in record.runner.buckets:
        if size not in record.runner.graphs:
            yield f"bucket {size} was not captured"


def _breaks(record: StepRecord) -> Iterator[str]:
    layers = record.model.spec.num_layers
    for size, graph in record.runner.graphs.items():
        if len(graph.breaks) != layers:
            yield f"bucket {size} has {len(graph.breaks)} breaks, expected {layers}: one a layer"


def _bucket(record: StepRecord) -> Iterator[str]:
    for arm in record.served():
        if arm.admission.bucket != record.bucket:
            yield f"served by bucket {arm.admission.bucket}, expected {record.bucket}"


def _reason(record: StepRecord) -> Iterator[str]:
    for arm in record.served():
        if arm.admission.bucket is None and not arm.admission.reason:
            yield "ran eagerly for no reason"


def _replays(record: StepRecord) -> Iterator[str]:
    for arm in record.served():
        bucket, counted = arm.admission.bucket, dict(arm.replays)
        if counted != ({} if bucket is None else {bucket: 1}):
            yield f"served by bucket {bucket}, but counted replays of {counted}"


def _fallbacks(record: StepRecord) -> Iterator[str]:
    for arm in record.served():
        admission, counted = arm.admission, dict(arm.fallbacks)
        if counted != ({admission.reason: 1} if admission.bucket is None else {}):
            yield f"eager because {admission.reason!r}, but counted fallbacks {counted}"


def _python(record: StepRecord) -> Iterator[str]:
    for arm in record.served():
        if arm.admission.bucket is not None and arm.model_forwards:
            yield "the model's Python ran during a replay"


def _idle(record: StepRecord) -> Iterator[str]:
    trace = record.replay.trace
    if not record.batch.num_requests and (trace.batches or trace.layers):
        yield "the backend was called for no requests"


def _prepared(record: StepRecord) -> Iterator[str]:
    batches, batch = record.replay.trace.batches, record.batch
    if batch.num_requests and [id(seen) for seen in batches] != [id(batch)]:
        yield f"metadata was prepared {len(batches)} times, or for another batch"


def _layers(record: StepRecord) -> Iterator[str]:
    layers = list(range(record.model.spec.num_layers))
    if record.batch.num_requests and record.replay.trace.layers != layers:
        yield f"the backend attended to layers {record.replay.trace.layers}, expected {layers}"


def _rows(record: StepRecord) -> Iterator[str]:
    rows, tokens = record.replay.trace.rows, record.batch.num_tokens
    if set(rows) - {tokens}:
        yield f"the backend was given {rows} rows for {tokens} tokens"


def _out(record: StepRecord) -> Iterator[str]:
    layers = record.replay.trace.elsewhere
    if layers:
        yield f"the backend declares supports_out, but returned another tensor, which is copied, in layers {layers}"


def _host_arrays(record: StepRecord) -> Iterator[str]:
    for name in ("input_ids_R", "positions_R", "slot_mapping_R", "page_table_BW"):
        if not torch.equal(getattr(record.batch, name), getattr(record.made, name)):
            yield f"{name} of the batch changed on the host"


def _device_arrays(record: StepRecord) -> Iterator[str]:
    now, then = record.batch, record.made
    pairs = {"kv_slots": (now.kv_slots, then.kv_slots)} if "kv_slots" in vars(now) else {}
    for field in fields(now.on_device):
        pairs[field.name] = getattr(now.on_device, field.name), getattr(then.on_device, field.name)
    for name, (ours, theirs) in pairs.items():
        if not torch.equal(ours, theirs):
            yield f"{name} of the batch changed on the device"


STRUCTURE = Check(
    name="structure",
    applies=lambda record: True,
    conditions={
        "captured": _captured,
        "breaks": _breaks,
        "bucket": _bucket,
        "reason": _reason,
        "replays": _replays,
        "fallbacks": _fallbacks,
        "python": _python,
        "idle": _idle,
        "prepared": _prepared,
        "layers": _layers,
        "rows": _rows,
        "out": _out,
        "host arrays": _host_arrays,
        "device arrays": _device_arrays,
    },
)
"""Check that the graphs and the calls are those of the batch: one break a layer, every layer once, real rows only."""
