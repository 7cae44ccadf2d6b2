"""The runner and its backends: what they are given, both metadata paths, switching without a new capture.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    BackendUnavailableError,
    Mode,
    PrefillBatch,
    UnknownBackendError,
    UnsupportedSpecError,
)
from bcg_core.breaks import active_recorder

Make = Callable[..., Any]


# What a backend is given


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("lengths", [(5,), (3, 4), (1, 1, 1)], ids=str)
def test_a_backend_sees_the_real_rows_alone(
    make_runner: Make, make_batch: Make, lengths: tuple[int, ...], mode: Mode
) -> None:
    runner, batch = make_runner(), make_batch(*lengths)
    runner.backend.seen.clear()
    runner.prefill(batch, mode=mode)
    assert runner.backend.seen == [(0, sum(lengths), batch), (1, sum(lengths), batch)]


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_metadata_is_made_once_for_all_layers(
    make_runner: Make, make_batch: Make, mode: Mode
) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    runner.backend.prepared.clear()
    runner.prefill(batch, mode=mode)
    assert runner.backend.prepared == [batch]


def test_metadata_is_made_before_the_first_segment(make_runner: Make, make_batch: Make) -> None:
    runner = make_runner()
    writes: list[int] = []

    def prepare(metadata: Any, batch: PrefillBatch) -> PrefillBatch:
        slots = batch.slot_mapping_R
        writes.append(int(runner.kv_cache.flat(0)[0][slots].count_nonzero()))
        return batch

    runner.backend.update_bucket_metadata = prepare
    runner.prefill(make_batch(3))
    assert writes == [0]


def test_keys_and_values_of_the_batch_are_in_the_cache_before_attention(
    make_runner: Make, make_batch: Make
) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    equal: list[bool] = []

    def compare(layer: int) -> None:
        real = runner.context.real
        keys, values = runner.kv_cache.flat(layer)
        slots = batch.slot_mapping_R
        equal.append(
            torch.equal(keys[slots], real.k_TKH) and torch.equal(values[slots], real.v_TKH)
        )

    runner.backend.before_forward = compare
    runner.prefill(batch)
    assert equal == [True, True]


def test_warm_up_runs_a_backend_at_the_size_of_each_bucket(make_runner: Make) -> None:
    backend = make_runner(buckets=(4, 8, 16)).backend
    seen = [(layer, rows, batch.max_kv_len > rows) for layer, rows, batch in backend.seen]
    sizes = (16, 8, 4)
    assert seen == [(0, size, behind_prefix) for size in sizes for behind_prefix in (False, True)]


def test_warm_up_batches_do_not_exceed_the_longest_context(
    make_runner: Make, toy_model: Make
) -> None:
    backend = make_runner(model=toy_model(max_positions=6), buckets=(4, 16)).backend
    plain = [batch.new_lens for batch in backend.prepared if not any(batch.prefix_lens)]
    assert plain == [(6, 6, 4), (4,)]
    assert all(batch.max_kv_len <= 6 for batch in backend.prepared)


def test_warm_up_batches_do_not_exceed_the_requests_of_a_batch(
    make_runner: Make, toy_model: Make
) -> None:
    runner = make_runner(model=toy_model(max_positions=6), buckets=(4, 16), max_requests=2)
    plain = [batch.new_lens for batch in runner.backend.prepared if not any(batch.prefix_lens)]
    assert plain == [(6, 6), (4,)]
    assert all(batch.num_requests <= 2 for batch in runner.backend.prepared)


def test_warm_up_has_no_prefix_for_a_backend_that_takes_none(
    make_runner: Make, make_backend: Make, toy_backend: type[Any]
) -> None:
    class Plain(toy_backend):
        capabilities = replace(toy_backend.capabilities, cached_prefix=False)

    backend = make_runner(backend=make_backend(Plain)).backend
    assert [batch.prefix_lens for batch in backend.prepared] == [(0,), (0,)]


def test_warm_up_of_a_backend_leaves_pages_in_use_alone(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner(captured=False)
    runner.prefill(make_batch(5))
    before = runner.kv_cache.storage_L2PSKH[:, :, 1:].clone()
    runner.capture()
    assert torch.equal(runner.kv_cache.storage_L2PSKH[:, :, 1:], before)


def test_a_backend_that_skips_its_warm_up_is_lazy_at_the_first_replay_and_in_no_capture(
    make_runner: Make, make_backend: Make, make_batch: Make, toy_backend: type[Any]
) -> None:
    # There it may compile, allocate and wait: a break is ordinary Python.
    recorders: list[Any] = []

    class Lazy(toy_backend):
        def warm_up(
            self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]
        ) -> None:
            pass

        def forward(self, *arguments: Any) -> Tensor:
            recorders.append(active_recorder.get())
            return super().forward(*arguments)

    runner = make_runner(backend=make_backend(Lazy))
    assert recorders == []
    assert runner.prefill(make_batch(3, 4)).admission.bucket == 8
    assert recorders == [None, None]


def test_a_backend_may_warm_up_as_it_likes(
    make_runner: Make, make_backend: Make, toy_backend: type[Any]
) -> None:
    class Choosy(toy_backend):
        def warm_up(
            self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]
        ) -> None:
            run(batches[-1])

    backend = make_runner(backend=make_backend(Choosy)).backend
    assert [rows for _, rows, _ in backend.seen] == [8]


# Metadata of a bucket


class Plan:
    """Metadata of a bucket: one address for life."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.cu_new_lens = torch.zeros(bucket + 1, dtype=torch.int32)
        self.batch: PrefillBatch | None = None


@pytest.fixture
def planned(make_runner: Make, make_backend: Make, toy_backend: type[Any]) -> Any:
    """Return a captured runner whose backend has metadata of its own for each bucket."""

    class Planned(toy_backend):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.plans: list[Plan] = []
            self.updates: list[tuple[Plan, PrefillBatch]] = []
            self.used: list[Any] = []

        def init_bucket_metadata(self, bucket: int) -> Plan:
            self.plans.append(Plan(bucket))
            return self.plans[-1]

        def update_bucket_metadata(self, metadata: Plan, batch: PrefillBatch) -> Plan:
            self.updates.append((metadata, batch))
            offsets = torch.tensor(batch.cu_new_lens, dtype=torch.int32)
            metadata.cu_new_lens[: len(offsets)] = offsets
            metadata.batch = batch
            return metadata

        def forward(self, *arguments: Any) -> Tensor:
            *first, metadata, out_RNH = arguments
            self.used.append(metadata)
            batch = metadata.batch if isinstance(metadata, Plan) else metadata
            return super().forward(*first, batch, out_RNH)

    return make_runner(backend=make_backend(Planned))


def test_metadata_of_a_bucket_is_made_once_for_each(planned: Any) -> None:
    assert [plan.bucket for plan in planned.backend.plans] == [16, 8]


def test_metadata_of_a_bucket_is_refreshed_once_before_each_replay(
    planned: Any, make_batch: Make
) -> None:
    first, second = make_batch(3), make_batch(4, 4)
    planned.prefill(first)
    planned.prefill(second)
    large, small = planned.backend.plans
    assert planned.backend.updates == [(small, first), (small, second)]
    assert large.batch is None


def test_metadata_of_a_bucket_is_what_forward_gets(planned: Any, make_batch: Make) -> None:
    planned.backend.used.clear()
    planned.prefill(make_batch(12))
    assert planned.backend.used == [planned.backend.plans[0]] * 2


def test_eager_prefills_do_not_touch_metadata_of_a_bucket(planned: Any, make_batch: Make) -> None:
    batch = make_batch(3)
    planned.backend.used.clear()
    planned.prefill(batch, mode=Mode.EAGER)
    assert planned.backend.updates == []
    assert planned.backend.used == [batch] * 2


def test_metadata_of_a_bucket_gives_the_results_of_the_ordinary_path(
    planned: Any, make_batch: Make
) -> None:
    batch = make_batch(3, 4)
    replayed = planned.prefill(batch).logits_BV
    assert torch.equal(replayed, planned.prefill(batch, mode=Mode.PADDED_EAGER).logits_BV)


def test_metadata_of_a_bucket_is_made_anew_after_release(planned: Any) -> None:
    planned.release()
    planned.capture()
    assert [plan.bucket for plan in planned.backend.plans] == [16, 8, 16, 8]


def test_without_metadata_of_its_own_a_bucket_takes_the_ordinary_path(
    make_runner: Make, make_batch: Make
) -> None:
    runner, batch = make_runner(), make_batch(3)
    assert runner.backend.init_bucket_metadata(8) is None
    assert runner.backend.update_bucket_metadata(None, batch) is batch


# Switching


def test_another_backend_needs_no_new_capture(
    make_runner: Make, make_backend: Make, make_batch: Make, toy_model: Make
) -> None:
    model = toy_model()
    runner = make_runner(model=model)
    model.calls, graphs = 0, dict(runner.graphs)
    other = make_backend()
    assert runner.use_backend(other) is other
    other.seen.clear()
    runner.prefill(make_batch(3))
    assert model.calls == 0
    assert runner.graphs == graphs
    assert len(other.seen) == 2


def test_backends_can_take_turns(make_runner: Make, make_backend: Make, make_batch: Make) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    first, second = runner.backend, make_backend()
    results = []
    for backend in (first, second, first):
        runner.use_backend(backend)
        results.append(runner.prefill(batch).logits_BV)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_backend_that_returns_is_not_warmed_up_again(
    make_runner: Make, make_backend: Make
) -> None:
    runner = make_runner()
    first = runner.backend
    first.seen.clear()
    runner.use_backend(make_backend())
    runner.use_backend(first)
    assert first.seen == []


def test_a_backend_is_not_warmed_up_before_the_capture(
    make_runner: Make, make_backend: Make
) -> None:
    runner, other = make_runner(captured=False), make_backend()
    runner.use_backend(other)
    assert other.seen == []
    runner.capture()
    assert len(other.seen) == 2 * 2  # buckets, each without and behind a prefix


def test_a_backend_can_be_switched_to_by_name(make_runner: Make, make_batch: Make) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    toy = runner.prefill(batch).logits_BV
    assert runner.use_backend("sdpa").name == "sdpa"
    torch.testing.assert_close(runner.prefill(batch).logits_BV, toy)


def test_results_that_a_backend_did_not_write_itself_are_copied_and_counted(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    runner.prefill(make_batch(3))
    assert runner.context.output_copies == 0
    runner.use_backend("sdpa")
    runner.prefill(make_batch(3))
    assert runner.context.output_copies == 2


def test_switching_to_an_unknown_name_keeps_the_backend(
    make_runner: Make, make_batch: Make
) -> None:
    runner = make_runner()
    backend = runner.backend
    with pytest.raises(UnknownBackendError, match=r"known backends: .*sdpa"):
        runner.use_backend("no such backend")
    assert runner.backend is backend
    assert runner.prefill(make_batch(3)).admission.bucket == 8


def test_options_of_a_switch_reach_the_backend(
    make_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def create(self: Any, name: str, *rest: Any, **options: Any) -> Any:
        asked.append(options)
        raise BackendUnavailableError(name, "only a test")

    monkeypatch.setattr("bcg_core.runner.BackendRegistry.create", create)
    with pytest.raises(BackendUnavailableError):
        make_runner(captured=False).use_backend("sdpa", splits=3)
    assert asked == [{"splits": 3}]


def test_a_backend_that_fails_to_warm_up_is_not_switched_to(
    make_runner: Make, make_backend: Make, make_batch: Make
) -> None:
    runner = make_runner()
    kept, failing = runner.backend, make_backend()
    failing.before_forward = raising(ArithmeticError("no kernel"))
    with pytest.raises(ArithmeticError, match="no kernel"):
        runner.use_backend(failing)
    assert runner.backend is kept
    assert runner.prefill(make_batch(3)).admission.bucket == 8


def raising(error: Exception) -> Callable[[int], None]:
    def fail(layer: int) -> None:
        raise error

    return fail


def test_a_backend_made_for_another_spec_is_refused(make_runner: Make, make_backend: Make) -> None:
    runner, other = make_runner(), make_backend()
    other.spec = replace(other.spec, head_dim=2 * other.spec.head_dim)
    with pytest.raises(UnsupportedSpecError, match="made for"):
        runner.use_backend(other)
    assert runner.backend is not other
