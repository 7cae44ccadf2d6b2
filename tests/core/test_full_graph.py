"""One graph a bucket, attention inside: replays have the bits of padded eager, and graphs belong to their backend.

Shape letters: R real tokens, T bucket tokens, S slots of the KV cache, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    Admission,
    CaptureError,
    Chunk,
    KVSequence,
    Mode,
    Phase,
    PrefillBatch,
    PrefillRunner,
    UnsupportedSpecError,
)
from bcg_harness.probe import Probe, Trace
from bcg_harness.testing import MaskBackend

Make = Callable[..., Any]
SameBits = Callable[[Any, Any], None]
Lengths = Sequence[tuple[int, int]]

# (cached, new) tokens of each request; the buckets are 8 and 16, and a batch has at most 8 requests.
COMPOSITIONS: dict[str, Lengths] = {
    "one_token": [(0, 1)],
    "one_request": [(0, 5)],
    "fills_the_bucket": [(0, 8)],
    "fills_the_largest_bucket": [(0, 16)],
    "one_more_than_a_bucket": [(0, 9)],
    "two_requests": [(0, 3), (0, 4)],
    "behind_a_prefix": [(9, 5)],
    "one_token_behind_a_prefix": [(17, 1)],
    "with_and_without_a_prefix": [(0, 2), (8, 3), (0, 1)],
    "as_many_requests_as_there_are_slots": [(0, 1)] * 8,
    "as_many_requests_behind_a_prefix": [
        (1, 1),
        (2, 2),
        (3, 1),
        (4, 1),
        (5, 2),
        (6, 1),
        (7, 3),
        (8, 1),
    ],
}
LARGE: Lengths = [(7, 2), (6, 2), (5, 3), (4, 1), (3, 1), (2, 2), (1, 1), (4, 4)]


@pytest.fixture
def runner(make_runner: Make, make_backend: Make) -> PrefillRunner:
    """Return a runner with full graphs of 8 and 16 tokens."""
    captured: PrefillRunner = make_runner(backend=make_backend(MaskBackend), full_graph=True)
    return captured


def lay_out(runner: PrefillRunner, lengths: Lengths, *, seed: int = 0) -> PrefillBatch:
    """Return a batch of requests whose prefixes are in the cache."""
    random = torch.Generator().manual_seed(seed)
    chunks = []
    for prefix, new in lengths:
        sequence = KVSequence()
        tokens = torch.randint(0, 61, (prefix + new,), generator=random).tolist()
        if prefix:
            first = Chunk(token_ids=tokens[:prefix], sequence=sequence)
            runner.prefill(PrefillBatch.from_chunks([first], runner.kv_cache), mode=Mode.EAGER)
        chunks.append(Chunk(token_ids=tokens[prefix:], sequence=sequence))
    return PrefillBatch.from_chunks(chunks, runner.kv_cache)


def outcome(runner: PrefillRunner, batch: PrefillBatch, mode: Mode) -> tuple[Tensor, ...]:
    """Prefill; return hidden states, logits, tokens and the cache, and leave the cache as it was."""
    storage = runner.kv_cache.storage_L2PSKH
    before = storage.clone()
    result = runner.prefill(batch, mode=mode)
    tensors = (result.hidden_RD, result.logits_BV, result.next_tokens_B, storage)
    copies = tuple(tensor.clone() for tensor in tensors)
    storage.copy_(before)
    return copies


# Against padded eager


@pytest.mark.parametrize("lengths", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_replay_has_the_bits_of_padded_eager(
    runner: PrefillRunner, assert_same_bits: SameBits, lengths: Lengths
) -> None:
    batch = lay_out(runner, lengths)
    replayed = outcome(runner, batch, Mode.BREAKABLE)
    assert sum(runner.stats.replays.values()) == 1
    assert_same_bits(replayed, outcome(runner, batch, Mode.PADDED_EAGER))


@pytest.mark.parametrize("lengths", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_replay_does_not_depend_on_a_larger_batch_before(
    runner: PrefillRunner, assert_same_bits: SameBits, lengths: Lengths
) -> None:
    batch = lay_out(runner, lengths)
    first = outcome(runner, batch, Mode.BREAKABLE)
    larger = lay_out(runner, LARGE, seed=7)
    outcome(runner, larger, Mode.BREAKABLE)
    assert_same_bits(outcome(runner, batch, Mode.BREAKABLE)[:3], first[:3])


@pytest.mark.parametrize("lengths", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_replay_agrees_with_one_that_breaks(
    runner: PrefillRunner, make_runner: Make, lengths: Lengths
) -> None:
    batch = lay_out(runner, lengths)
    hidden_RD, logits_BV, *_ = outcome(runner, batch, Mode.BREAKABLE)
    breaking = make_runner(kv_cache=runner.kv_cache)
    expected_RD, expected_BV, *_ = outcome(breaking, batch, Mode.BREAKABLE)
    torch.testing.assert_close(hidden_RD, expected_RD)
    torch.testing.assert_close(logits_BV, expected_BV)


@pytest.mark.parametrize("lengths", [[(0, 3)], [(9, 3)], LARGE], ids=["new", "prefix", "many"])
def test_padded_rows_get_no_attention(runner: PrefillRunner, lengths: Lengths) -> None:
    batch = lay_out(runner, lengths)
    runner.workspace.boundary.fill_(float("nan"))
    runner.prefill(batch)
    padded = runner.admit(batch).bucket
    assert not runner.workspace.boundary.out_MX[batch.num_tokens : padded].any()


def test_a_batch_that_no_bucket_holds_runs_eagerly(
    runner: PrefillRunner, assert_same_bits: SameBits
) -> None:
    batch = lay_out(runner, [(0, 17)])
    eager = outcome(runner, batch, Mode.EAGER)
    assert_same_bits(outcome(runner, batch, Mode.BREAKABLE), eager)
    assert runner.stats.fallbacks == {"more tokens than the largest bucket (16)": 1}


# What is captured


def test_each_bucket_is_one_segment(make_runner: Make, make_backend: Make) -> None:
    runner = make_runner(backend=make_backend(MaskBackend), full_graph=True, captured=False)
    buckets = runner.capture().buckets
    assert [(each.bucket, each.segments, each.breaks) for each in buckets] == [
        (16, 1, 0),
        (8, 1, 0),
    ]


def test_neither_model_nor_backend_runs_at_replay(
    runner: PrefillRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, calls = lay_out(runner, [(0, 3)]), runner.model.calls
    monkeypatch.setattr(runner.backend, "forward", None)
    runner.prefill(batch)
    assert runner.model.calls == calls


def test_attention_over_all_rows_runs_before_it_is_captured(
    make_runner: Make, make_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[tuple[Phase, int]] = []

    class Noting(MaskBackend):
        def warm_up(self, *arguments: Any) -> None:
            """Run nothing."""

        def forward(self, q_RNH: Tensor, *arguments: Any) -> Tensor:
            phases.append((runner.context.phase, q_RNH.shape[0]))
            return super().forward(q_RNH, *arguments)

    runner = make_runner(backend=make_backend(Noting), full_graph=True, captured=False)
    runner.capture()
    assert phases == [
        (phase, bucket)
        for phase in (Phase.WARM_UP, Phase.CAPTURE)
        for bucket in (16, 8)
        for _ in range(2)  # layers
    ]


def test_memory_of_the_buckets_adds_up(make_runner: Make, make_backend: Make) -> None:
    runner = make_runner(backend=make_backend(MaskBackend), full_graph=True, captured=False)
    report = runner.capture()
    assert all(bucket.memory_bytes > 0 for bucket in report.buckets)
    assert sum(bucket.memory_bytes for bucket in report.buckets) == report.memory_bytes


# Backends and their graphs


def test_another_backend_needs_a_new_capture(runner: PrefillRunner, make_backend: Make) -> None:
    kept = runner.backend
    with pytest.raises(CaptureError, match=r"'mask': call release\(\)"):
        runner.use_backend(make_backend(MaskBackend))
    assert runner.backend is kept


def test_a_name_is_not_looked_up_for_captured_graphs(runner: PrefillRunner) -> None:
    with pytest.raises(CaptureError, match="release"):
        runner.use_backend("no such backend")


def test_the_backend_of_the_graphs_may_be_named_again(runner: PrefillRunner) -> None:
    assert runner.use_backend(runner.backend) is runner.backend


def test_after_release_another_backend_can_be_captured(
    runner: PrefillRunner, make_backend: Make, assert_same_bits: SameBits
) -> None:
    batch = lay_out(runner, [(0, 2), (8, 3)])
    first = outcome(runner, batch, Mode.BREAKABLE)
    runner.release()
    runner.use_backend(make_backend(MaskBackend))
    runner.capture()
    assert_same_bits(outcome(runner, batch, Mode.BREAKABLE), first)


def test_without_graphs_the_backend_can_be_switched(make_runner: Make, make_backend: Make) -> None:
    runner, other = make_runner(captured=False, full_graph=True), make_backend(MaskBackend)
    assert runner.use_backend(other) is other
    assert len(runner.capture().buckets) == 2


def test_a_wrapped_backend_can_be_captured(
    make_runner: Make, make_backend: Make, assert_same_bits: SameBits
) -> None:
    probe = Probe(make_backend(MaskBackend))
    runner = make_runner(backend=probe, full_graph=True)
    batch = lay_out(runner, [(0, 2), (8, 3)])
    probe.trace = Trace()
    replayed = outcome(runner, batch, Mode.BREAKABLE)
    assert (len(probe.trace.batches), probe.trace.layers) == (1, [])
    assert_same_bits(replayed, outcome(runner, batch, Mode.PADDED_EAGER))


def test_a_wrapped_backend_is_refused_for_what_it_wraps(
    make_runner: Make, make_backend: Make
) -> None:
    runner = make_runner(backend=Probe(make_backend()), full_graph=True, captured=False)
    with pytest.raises(UnsupportedSpecError, match="'toy': no full graph"):
        runner.capture()


# Refusals


def test_a_backend_that_does_not_declare_it_is_refused(make_runner: Make) -> None:
    runner = make_runner(full_graph=True, captured=False)
    with pytest.raises(UnsupportedSpecError, match=r"'toy': no full graph: supports_full_graph"):
        runner.capture()
    assert runner.graphs == {}
    assert runner.backend.seen == []


def test_a_backend_that_was_refused_still_runs_eagerly(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner(full_graph=True, captured=False)
    with pytest.raises(UnsupportedSpecError):
        runner.capture()
    admission = runner.prefill(make_batch(3)).admission
    assert admission == Admission.eager("no bucket is captured")


def test_a_declaration_without_metadata_is_refused(
    make_runner: Make, make_backend: Make, toy_backend: type[Any]
) -> None:
    class Declares(toy_backend):
        capabilities = replace(toy_backend.capabilities, supports_full_graph=True)

    runner = make_runner(backend=make_backend(Declares), full_graph=True, captured=False)
    with pytest.raises(UnsupportedSpecError, match="full_graph_metadata is not implemented"):
        runner.capture()


@pytest.mark.parametrize("field", ["max_requests", "max_context"])
def test_a_backend_made_for_less_than_batches_may_have_is_refused(
    make_runner: Make, make_backend: Make, field: str
) -> None:
    backend = make_backend(MaskBackend)
    backend.limits = replace(backend.limits, **{field: 7})
    runner = make_runner(backend=backend, full_graph=True, captured=False)
    with pytest.raises(UnsupportedSpecError, match=f"made for {field} of 7"):
        runner.capture()


# Faults


def failing(phase: Phase, error: Exception, size: int = 16) -> type[MaskBackend]:
    """Return a backend that raises ``error`` in its first forward over ``size`` rows in ``phase``."""

    class Failing(MaskBackend):
        context: Any = None

        def forward(self, q_RNH: Tensor, *arguments: Any) -> Tensor:
            now = None if self.context is None else (self.context.phase, q_RNH.shape[0])
            if now == (phase, size):
                self.context = None
                raise error
            return super().forward(q_RNH, *arguments)

    return Failing


@pytest.fixture
def make_failing(make_runner: Make, make_backend: Make) -> Make:
    """Return a function that makes a runner whose backend fails once, while it captures."""

    def make(phase: Phase, error: Exception) -> PrefillRunner:
        backend = make_backend(failing(phase, error))
        runner: PrefillRunner = make_runner(backend=backend, full_graph=True, captured=False)
        backend.context = runner.context
        return runner

    return make


@pytest.mark.parametrize("phase", [Phase.WARM_UP, Phase.CAPTURE], ids=lambda phase: phase.value)
def test_a_failure_of_the_backend_reaches_the_caller_and_the_next_capture_works(
    make_failing: Make, assert_same_bits: SameBits, phase: Phase
) -> None:
    runner = make_failing(phase, ArithmeticError("no kernel"))
    with pytest.raises(ArithmeticError, match="no kernel") as caught:
        runner.capture()
    assert any("bucket 16" in note for note in caught.value.__notes__)
    assert runner.graphs == {}
    runner.capture()
    batch = lay_out(runner, [(3, 2)])
    replayed = outcome(runner, batch, Mode.BREAKABLE)
    assert_same_bits(replayed, outcome(runner, batch, Mode.PADDED_EAGER))


@pytest.mark.parametrize("phase", [Phase.WARM_UP, Phase.CAPTURE], ids=lambda phase: phase.value)
def test_a_bucket_whose_attention_runs_out_of_memory_is_left_out(
    make_failing: Make, phase: Phase
) -> None:
    runner = make_failing(phase, torch.OutOfMemoryError("no room"))
    report = runner.capture()
    assert report.failed == {16: "out of memory: no room"}
    assert [bucket.bucket for bucket in report.buckets] == [8]


class CountsInPython(MaskBackend):
    """Attend over as many rows as the live batch has, which is a Python number and so frozen at capture."""

    rows = 0

    def update_bucket_metadata(self, metadata: Tensor | None, batch: PrefillBatch) -> Tensor:
        self.rows = batch.num_tokens
        return super().update_bucket_metadata(metadata, batch)

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        self.rows = batch.num_tokens
        return super().init_forward_metadata(batch)

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: Any,
        layer: int,
        metadata: Tensor,
        out_RNH: Tensor | None,
    ) -> Tensor:
        assert out_RNH is not None
        mine = slice(0, self.rows)
        super().forward(
            q_RNH[mine], k_RKH[mine], v_RKH[mine], kv_cache, layer, metadata, out_RNH[mine]
        )
        return out_RNH


class CopiesItsMask(MaskBackend):
    """Give the capture a copy of the mask, which replays do not refresh."""

    def full_graph_metadata(self, metadata: Tensor | None, bucket: int) -> Tensor:
        return super().full_graph_metadata(metadata, bucket).clone()


@pytest.mark.parametrize("fault", [CountsInPython, CopiesItsMask])
def test_what_a_backend_freezes_at_capture_shows_in_the_result(
    make_runner: Make, make_backend: Make, fault: type[MaskBackend]
) -> None:
    runner = make_runner(backend=make_backend(fault), full_graph=True)
    batch = lay_out(runner, [(0, 3), (9, 9)])
    replayed, *_ = outcome(runner, batch, Mode.BREAKABLE)
    expected, *_ = outcome(runner, batch, Mode.PADDED_EAGER)
    assert not torch.equal(replayed, expected)
