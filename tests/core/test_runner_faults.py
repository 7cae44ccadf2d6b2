"""Faults seen in the field, as the smallest inputs that show them.

Shape letters: T bucket (padded) tokens, R real tokens.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Mode,
    PagedKVCache,
    PrefillBatch,
    eager_on_graph,
)
from bcg_harness.testing import written_sequence

Make = Callable[..., Any]
MODES = pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)


def other_rows(kv_cache: PagedKVCache, batch: PrefillBatch) -> Tensor:
    """Return the cache without the slots of ``batch`` and without the reserved page, as a copy."""
    flat = kv_cache.storage_L2PSKH.flatten(2, 3)
    keep = torch.ones(kv_cache.num_slots, dtype=torch.bool)
    keep[batch.slot_mapping_R] = False
    keep[: kv_cache.page_size] = False
    return flat[:, :, keep].clone()


# Slots


@MODES
@pytest.mark.parametrize("lengths", [(5,), (2, 3), (8,), (1,), (9,)], ids=str)
def test_no_cache_row_outside_of_the_slots_of_the_batch_changes(
    make_runner: Make,
    make_batch: Make,
    kv_cache: PagedKVCache,
    lengths: tuple[int, ...],
    mode: Mode,
) -> None:
    runner = make_runner()
    kv_cache.storage_L2PSKH.normal_(generator=torch.Generator().manual_seed(0))
    batch = make_batch(*lengths)
    before = other_rows(kv_cache, batch)
    runner.prefill(batch, mode=mode)
    assert torch.equal(other_rows(kv_cache, batch), before)


@MODES
def test_every_slot_of_the_batch_is_written(
    make_runner: Make, make_batch: Make, kv_cache: PagedKVCache, mode: Mode
) -> None:
    runner, batch = make_runner(), make_batch(2, 3)
    kv_cache.storage_L2PSKH.fill_(float("nan"))
    kv_cache.storage_L2PSKH[:, :, :, 0].zero_()
    kv_cache.storage_L2PSKH.flatten(2, 3)[:, :, batch.slot_mapping_R] = float("nan")
    runner.prefill(batch, mode=mode)
    written = kv_cache.storage_L2PSKH.flatten(2, 3)[:, :, batch.slot_mapping_R]
    assert written.isfinite().all()


def test_slots_are_those_of_the_batch_and_not_of_the_capture(
    make_runner: Make, make_batch: Make, kv_cache: PagedKVCache
) -> None:
    runner = make_runner()
    first, second = make_batch(5), make_batch(5)
    runner.prefill(first)
    before = other_rows(kv_cache, second)
    runner.prefill(second)
    assert torch.equal(other_rows(kv_cache, second), before)


# Padding


def test_a_short_batch_after_a_long_one_has_a_clean_padded_tail(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    runner.prefill(make_batch(16))
    runner.prefill(make_batch(9))
    inputs = runner.workspace.inputs(16)
    assert inputs.input_ids_T[9:].tolist() == [0] * 7
    assert inputs.positions_T[9:].tolist() == [0] * 7
    assert inputs.slot_mapping_T[9:].tolist() == [0] * 7


def test_stale_positions_of_an_earlier_batch_are_not_looked_up(
    make_runner: Make, make_chunk: Make, make_batch: Make
) -> None:
    # Positions 48 to 55, then 0 and 1: a tail left as it was would read NaN from the table.
    runner = make_runner()
    long = make_chunk(8, sequence=written_sequence(runner.kv_cache, 48))
    runner.prefill(PrefillBatch.from_chunks([long], runner.kv_cache))
    runner.model.table_S[2:] = float("nan")
    runner.prefill(make_batch(2))
    assert runner.workspace.hidden_MD[:8].isfinite().all()


def global_maximum(toy_model: type[Any]) -> Any:
    """Return a toy model whose last segment divides by a maximum over all rows, padded ones included."""

    class Global(toy_model):
        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            hidden_TD = super().forward(input_ids_T, positions_T, ctx)
            return hidden_TD / (1 + ctx.io.out_TX.abs().amax())

    return Global()


@pytest.mark.parametrize("mode", [Mode.BREAKABLE, Mode.PADDED_EAGER], ids=lambda m: m.value)
def test_unwritten_rows_do_not_reach_real_ones_through_a_reduction(
    make_runner: Make, make_batch: Make, toy_model: type[Any], mode: Mode
) -> None:
    runner, batch = make_runner(model=global_maximum(toy_model)), make_batch(3)
    runner.workspace.boundary.fill_(float("nan"))
    dirty = runner.prefill(batch, mode=mode).logits_BV
    runner.workspace.boundary.fill_(0)
    clean = runner.prefill(batch, mode=mode).logits_BV
    assert dirty.isfinite().all()
    assert torch.equal(dirty, clean)


def test_rows_of_an_earlier_batch_do_not_reach_real_ones_through_a_reduction(
    make_runner: Make, make_batch: Make, toy_model: type[Any]
) -> None:
    runner, batch = make_runner(model=global_maximum(toy_model)), make_batch(3)
    first = runner.prefill(batch).logits_BV
    runner.prefill(make_batch(8, seed=9))
    assert torch.equal(runner.prefill(batch).logits_BV, first)


def test_a_runner_that_forgets_to_clear_the_tail_is_found_by_that_reduction(
    make_runner: Make, make_batch: Make, toy_model: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, batch = make_runner(model=global_maximum(toy_model)), make_batch(3)
    clean = runner.prefill(batch).logits_BV
    bind = runner.context.bind

    def forgetful(*arguments: Any) -> None:
        bind(*arguments)
        runner.context.io.out_TX[3:] = 100

    monkeypatch.setattr(runner.context, "bind", forgetful)
    assert not torch.equal(runner.prefill(batch).logits_BV, clean)


@pytest.mark.parametrize("lengths", [(5,), (2, 3), (1,)], ids=str)
def test_padded_rows_stay_finite(
    make_runner: Make, make_batch: Make, lengths: tuple[int, ...]
) -> None:
    runner = make_runner()
    runner.workspace.boundary.fill_(float("nan"))
    runner.workspace.hidden_MD.fill_(float("nan"))
    runner.prefill(make_batch(*lengths))
    assert runner.workspace.hidden_MD[:8].isfinite().all()
    assert runner.kv_cache.storage_L2PSKH.isfinite().all()


def test_metadata_is_made_for_the_real_count(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    runner.backend.prepared.clear()
    runner.prefill(make_batch(3, 4))
    (batch,) = runner.backend.prepared
    assert (batch.num_tokens, batch.cu_new_lens) == (7, (0, 3, 7))


# Live state


@pytest.mark.parametrize("lengths", [(8,), (3, 5), (5, 3), (1, 7), (2, 2, 2, 2)], ids=str)
def test_request_boundaries_are_those_of_the_batch(
    make_runner: Make, make_batch: Make, lengths: tuple[int, ...]
) -> None:
    runner = make_runner(buckets=(8,))
    runner.prefill(make_batch(8, seed=50))
    batch = make_batch(*lengths)
    replayed = runner.prefill(batch).hidden_RD
    torch.testing.assert_close(replayed, make_runner(captured=False).prefill(batch).hidden_RD)


def test_a_small_batch_after_one_of_many_requests_is_unharmed(
    make_runner: Make, make_batch: Make
) -> None:
    runner, alone = make_runner(), make_batch(6, seed=7)
    runner.prefill(make_batch(1, 2, 3, 2, seed=20))
    replayed = runner.prefill(alone).logits_BV
    assert torch.equal(replayed, make_runner().prefill(alone).logits_BV)


def test_offsets_of_a_second_chunk_are_its_own(make_runner: Make, make_chunk: Make) -> None:
    runner, chunk = make_runner(), make_chunk(4)
    runner.prefill(PrefillBatch.from_chunks([chunk], runner.kv_cache))
    runner.backend.seen.clear()
    more = make_chunk(4, sequence=chunk.sequence)
    runner.prefill(PrefillBatch.from_chunks([more], runner.kv_cache))
    assert [metadata.prefix_lens for _, _, metadata in runner.backend.seen] == [(4,), (4,)]


def test_an_offset_that_is_passed_as_a_number_is_frozen(graph: BreakableCUDAGraph) -> None:
    # Why the break takes the context and not the offset: this is what an offset would do.
    seen: list[int] = []
    attend = eager_on_graph(lambda offset: seen.append(offset))
    state = {"offset": 0}
    with BreakableCUDAGraphCapture(graph):
        attend(state["offset"])
    state["offset"] = 4
    graph.replay()
    assert seen == [0, 0]


def test_buckets_with_equally_many_requests_share_no_metadata(
    make_runner: Make, make_backend: Make, make_batch: Make, toy_backend: type[Any]
) -> None:
    class Planned(toy_backend):
        def init_bucket_metadata(self, bucket: int) -> dict[str, Any]:
            return {"bucket": bucket}

        def update_bucket_metadata(self, metadata: dict[str, Any], batch: Any) -> Any:
            metadata["lens"] = batch.new_lens
            self.plans = [*getattr(self, "plans", []), metadata]
            return batch

    runner = make_runner(backend=make_backend(Planned))
    runner.prefill(make_batch(2, 3))
    runner.prefill(make_batch(6, 7))
    small, large = runner.backend.plans
    assert small == {"bucket": 8, "lens": (2, 3)}
    assert large == {"bucket": 16, "lens": (6, 7)}


# Memory


def churn() -> None:
    """Allocate, fill and free many tensors of the sizes that a runner has."""
    gc.collect()
    noise = [torch.full((size,), 2**40) for size in (8, 16, 24, 48, 256) for _ in range(50)]
    del noise


@pytest.mark.parametrize("lengths", [(9,), (3, 4), (16,)], ids=str)
def test_addresses_recorded_at_capture_are_held_by_the_runner(
    make_runner: Make, make_batch: Make, lengths: tuple[int, ...]
) -> None:
    # Whatever bucket serves it: what it reads is what the runner writes, and the other way round.
    runner, batch = make_runner(), make_batch(*lengths)
    runner.prefill(make_batch(5, seed=30))
    churn()
    replayed = runner.prefill(batch).hidden_RD.clone()
    assert torch.equal(replayed, runner.prefill(batch, mode=Mode.PADDED_EAGER).hidden_RD)


def test_a_dropped_runner_frees_its_graphs(make_runner: Make) -> None:
    runner = make_runner()
    alive = weakref.ref(runner.graphs[8])
    del runner
    gc.collect()
    assert alive() is None


def test_boundary_memory_does_not_depend_on_layers_and_buckets(
    make_runner: Make, toy_model: Make
) -> None:
    one, many = toy_model(layers=1), toy_model(layers=2)
    few = make_runner(
        model=one,
        kv_cache=PagedKVCache(one.spec, num_pages=32, page_size=4),
        buckets=(16,),
        captured=False,
    ).workspace
    many = make_runner(model=many, buckets=(2, 4, 8, 16), captured=False).workspace
    assert few.boundary.qkv_MX.shape == many.boundary.qkv_MX.shape
    assert few.boundary.out_MX.shape == many.boundary.out_MX.shape


def test_breaks_hold_no_tensors_of_their_own(make_runner: Make) -> None:
    # q, k, v and the output live in the boundary buffers: the arguments of every break are the
    # context and a layer number.
    runner = make_runner()
    arguments = [recorded._call.args for recorded in runner.graphs[8].breaks]
    assert arguments == [(runner.context, 0), (runner.context, 1)]


# Weights


def test_a_weight_that_is_updated_in_place_is_seen_by_replays(
    make_runner: Make, make_batch: Make
) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    before = runner.prefill(batch).logits_BV
    runner.model.qkv_DX[0].mul_(1.5)
    after = runner.prefill(batch).logits_BV
    assert not torch.equal(after, before)
    assert torch.equal(after, runner.prefill(batch, mode=Mode.PADDED_EAGER).logits_BV)


def test_a_weight_that_is_replaced_shows_as_a_difference_from_eager(
    make_runner: Make, make_batch: Make
) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    runner.model.qkv_DX[0] = runner.model.qkv_DX[0] * 1.5
    replayed = runner.prefill(batch).logits_BV
    assert not torch.equal(replayed, runner.prefill(batch, mode=Mode.PADDED_EAGER).logits_BV)


# Silent fallback


def test_every_prefill_is_counted_exactly_once(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    for batch in (make_batch(3), make_batch(17), make_batch(), make_batch(16)):
        runner.prefill(batch)
    runner.prefill(make_batch(3), mode=Mode.EAGER)
    stats = runner.stats
    assert stats.replays == {8: 1, 16: 1}
    assert stats.fallbacks == {
        "more tokens than the largest bucket (16)": 1,
        "no requests": 1,
    }
    assert stats.requested == {"eager": 1}


def test_attention_called_from_within_a_break_runs_inline(
    make_runner: Make, make_batch: Make, toy_model: type[Any]
) -> None:
    class Nested(toy_model):
        """Wraps its whole forward into a break, in which every layer's break is nested."""

        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            whole = eager_on_graph(super().forward)
            return whole(input_ids_T, positions_T, ctx)

    runner, batch = make_runner(model=Nested(), captured=False), make_batch(3, 4)
    assert [bucket.breaks for bucket in runner.capture().buckets] == [1, 1]
    replayed = runner.prefill(batch).logits_BV
    assert torch.equal(replayed, runner.prefill(batch, mode=Mode.PADDED_EAGER).logits_BV)
