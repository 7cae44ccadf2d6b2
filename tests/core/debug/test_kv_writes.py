"""The KV write guard: a forward changes its batch's own slots, and nobody else's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bcg_core import PagedKVCache, StrayWriteError
from bcg_core.debug import KVWriteGuard, PaddingPoison, WatchedRunner
from bcg_core.debug.kv_writes import checksums
from bcg_harness.testing import ForgetsPaddedInputs

Make = Callable[..., Any]


class WatchedForgetsPaddedInputs(WatchedRunner, ForgetsPaddedInputs):
    """Watched, and at fault."""


@pytest.mark.parametrize("lengths", [(5,), (2, 3), (8,), (1,), (9,), (17,), ()], ids=str)
def test_what_is_right_is_accepted(
    make_watched: Make, make_batch: Make, lengths: tuple[int, ...]
) -> None:
    make_watched(tools=[KVWriteGuard()]).prefill(make_batch(*lengths))


def test_a_cache_full_of_nan_is_no_change(
    make_watched: Make, make_batch: Make, kv_cache: PagedKVCache
) -> None:
    runner, batch = make_watched(tools=[KVWriteGuard()]), make_batch(4)
    kv_cache.storage_L2PSKH.fill_(float("nan"))
    runner.prefill(batch)


def test_slots_of_an_earlier_batch_are_found(make_watched: Make, make_batch: Make) -> None:
    runner = make_watched(WatchedForgetsPaddedInputs, tools=[KVWriteGuard()])
    earlier = make_batch(8)
    runner.prefill(earlier)
    slots = earlier.slot_mapping_R[3:].tolist()
    with pytest.raises(
        StrayWriteError, match=rf"KV slots {sorted(slots)} changed".replace("[", r"\[")
    ):
        runner.prefill(make_batch(3, seed=5))


def test_poisoned_slots_show_stale_ones_without_an_earlier_batch(
    make_watched: Make, make_batch: Make
) -> None:
    runner = make_watched(WatchedForgetsPaddedInputs, tools=[PaddingPoison(), KVWriteGuard()])
    with pytest.raises(StrayWriteError):
        runner.prefill(make_batch(3))


def test_a_backend_that_writes_to_the_cache_is_found_with_slot_page_and_layer(
    make_watched: Make, make_batch: Make, kv_cache: PagedKVCache
) -> None:
    runner = make_watched(tools=[KVWriteGuard()])

    def write(layer: int) -> None:
        if layer == 1:
            kv_cache.storage_L2PSKH[1, 0, 30, 2, 0, 0] += 1

    runner.backend.before_forward = write
    with pytest.raises(
        StrayWriteError, match=r"KV slots \[122\] changed, of pages \[30\] in layers \[1\]"
    ):
        runner.prefill(make_batch(3))


def test_many_slots_are_counted(make_batch: Make, kv_cache: PagedKVCache) -> None:
    with (
        pytest.raises(StrayWriteError, match=r"119\] and 4 more changed"),
        KVWriteGuard().watching(kv_cache, make_batch(3)),
    ):
        kv_cache.storage_L2PSKH[:, :, 28:31] += 1


def test_page_0_is_nobodys(make_batch: Make, kv_cache: PagedKVCache) -> None:
    with KVWriteGuard().watching(kv_cache, make_batch(3)):
        kv_cache.storage_L2PSKH[:, :, 0] = 1


def test_an_error_inside_is_not_hidden_by_what_it_left_behind(
    make_batch: Make, kv_cache: PagedKVCache
) -> None:
    def write_and_fail() -> None:
        with KVWriteGuard().watching(kv_cache, make_batch(3)):
            kv_cache.storage_L2PSKH += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("value", [-0.0, 1.0, float("nan")], ids=str)
def test_a_checksum_sees_one_element(
    toy_model: type[Any], dtype: torch.dtype, value: float
) -> None:
    kv_cache = PagedKVCache(replace(toy_model().spec, dtype=dtype), num_pages=4, page_size=2)
    before = checksums(kv_cache)
    kv_cache.storage_L2PSKH[1, 0, 3, 1, 1, 7] = value
    assert (checksums(kv_cache) != before).nonzero().tolist() == [[1, 0, 7]]


def test_a_checksum_sees_a_swap(kv_cache: PagedKVCache) -> None:
    slot = kv_cache.storage_L2PSKH[0, 0, 1, 0, 0]
    slot[:2] = torch.tensor([1.0, 2.0])
    before = checksums(kv_cache)
    slot[:2] = torch.tensor([2.0, 1.0])
    assert not torch.equal(checksums(kv_cache), before)
