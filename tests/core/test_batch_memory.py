"""A batch is what it was when it was checked, wherever its arrays came from."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bcg_core import Chunk, KVSequence, PagedKVCache, PrefillBatch, PrefillRunner
from bcg_core.batch_checks import index_tensor

Make = Callable[..., Any]

KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "int64": torch.tensor,
    "int32": lambda values: torch.tensor(values, dtype=torch.int32),
    "view": lambda values: torch.tensor([values, values])[0],
    "numpy": np.array,
    "list": list,
}


def spoil(values: Any) -> None:
    if isinstance(values, Tensor):
        values.fill_(1)
    elif isinstance(values, np.ndarray):
        values.fill(1)
    else:
        for place, value in enumerate(values):
            if isinstance(value, list):
                spoil(value)
            else:
                values[place] = 1


def contents(batch: PrefillBatch) -> list[Any]:
    tensors = (
        batch.input_ids_R,
        batch.positions_R,
        batch.slot_mapping_R,
        batch.page_table_BW,
        batch.on_device.page_table_BW,
        batch.on_device.kv_lens,
        batch.kv_slots,
    )
    return [batch.new_lens, batch.prefix_lens, batch.pages, *(t.tolist() for t in tensors)]


def build(kv_cache: PagedKVCache, **arrays: Any) -> PrefillBatch:
    return PrefillBatch.build(
        kv_cache=kv_cache,
        **{
            "input_ids": [3, 4, 5],
            "new_lens": [2, 1],
            "prefix_lens": [2, 0],
            "page_table": [[7], [9]],
            **arrays,
        },
    )


ARRAYS: dict[str, list[Any]] = {
    "input_ids": [3, 4, 5],
    "new_lens": [2, 1],
    "prefix_lens": [2, 0],
    "page_table": [[7], [9]],
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", ARRAYS)
def test_a_batch_does_not_follow_its_arrays(
    kv_cache: PagedKVCache, kind: Callable[[list[Any]], Any], name: str
) -> None:
    given = kind([list(row) for row in ARRAYS[name]] if name == "page_table" else ARRAYS[name][:])
    batch = build(kv_cache, **{name: given})
    expected = contents(build(kv_cache))
    spoil(given)
    assert contents(batch) == expected


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("requests", [1, 2])
def test_a_batch_of_chunks_does_not_follow_their_tokens(
    kv_cache: PagedKVCache, kind: Callable[[list[Any]], Any], requests: int
) -> None:
    given = [kind([3, 4, 5]) for _ in range(requests)]
    batch = PrefillBatch.from_chunks(
        [Chunk(token_ids=tokens, sequence=KVSequence()) for tokens in given], kv_cache
    )
    for tokens in given:
        spoil(tokens)
    assert batch.input_ids_R.tolist() == [3, 4, 5] * requests


class SharesMemory(PrefillBatch):
    """Keep the caller's array of tokens."""

    @classmethod
    def build(cls, *, input_ids: Any, **arrays: Any) -> Any:
        batch = PrefillBatch.build(input_ids=input_ids, **arrays)
        object.__setattr__(batch, "input_ids_R", input_ids)
        return batch


def test_a_batch_that_shares_memory_is_found(kv_cache: PagedKVCache) -> None:
    given = torch.tensor([3, 4, 5])
    batch = SharesMemory.build(input_ids=given, new_lens=[3], page_table=[[7]], kv_cache=kv_cache)
    given.fill_(61)
    assert batch.input_ids_R.tolist() == [61] * 3


# Whatever device is the default


@pytest.fixture
def default_meta() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_meta")
@pytest.mark.parametrize("values", [[], [1, 2]], ids=["empty", "some"])
def test_rows_are_made_on_the_host(values: list[int]) -> None:
    assert index_tensor(values, "row").device.type == "cpu"


def test_batches_are_made_on_the_host_whatever_the_default_device(
    kv_cache: PagedKVCache, default_meta: None
) -> None:
    batches = [
        build(kv_cache),
        PrefillBatch.scratch([2, 3], kv_cache, prefix_len=5),
        PrefillBatch.scratch([], kv_cache),
        PrefillBatch.from_chunks([], kv_cache),
        PrefillBatch.from_chunks([Chunk(token_ids=[1, 2], sequence=KVSequence())], kv_cache),
    ]
    for batch in batches:
        assert batch.input_ids_R.device.type == "cpu"
        assert batch.on_device.kv_lens.device.type == "cpu"
        assert len(batch.kv_slots) == sum(batch.kv_lens)


def test_pages_are_copied_and_cleared_whatever_the_default_device(
    kv_cache: PagedKVCache, default_meta: None
) -> None:
    kv_cache.clear([3])
    kv_cache.clear_slots([3])
    kv_cache.copy_pages([(1, 2)])


def test_a_prefill_is_right_whatever_the_default_device(
    make_runner: Make, make_batch: Make
) -> None:
    runner: PrefillRunner = make_runner()
    expected = runner.prefill(make_batch(5, 2)).logits_BV.clone()
    torch.set_default_device("meta")
    try:
        batch = make_batch_on_cpu(runner)
        runner.workspace.load(batch, runner.workspace.inputs(8))
    finally:
        torch.set_default_device(None)
    assert runner.workspace.inputs(8).input_ids_T.tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert torch.equal(runner.prefill(make_batch(5, 2)).logits_BV, expected)


def make_batch_on_cpu(runner: PrefillRunner) -> PrefillBatch:
    chunk = Chunk(token_ids=[5, 6, 7], sequence=KVSequence())
    return PrefillBatch.from_chunks([chunk], runner.kv_cache)
