"""Batches from what is no integer, or of another shape: refused with the request or the argument."""

from typing import Any

import numpy as np
import pytest
import torch

from bcg_core import BatchError, Chunk, KVSequence, PagedKVCache, PrefillBatch
from bcg_harness.testing import sequence_on, written_sequence

ROW = "must be one row of integers"
TOKENS: dict[str, tuple[Any, str]] = {
    "floats": ([1.5, 2.0], f"{ROW} of 64 bits: 'float' object cannot be"),
    "one_float": ([1, 2.0], f"{ROW} of 64 bits: 'float' object cannot be"),
    "strings": (["1", "2"], f"{ROW} of 64 bits: 'str' object cannot be"),
    "text": ("12", f"{ROW} of 64 bits: 'str' object cannot be"),
    "nothing": (None, f"{ROW} of 64 bits: 'NoneType' object is not"),
    "beyond_64_bits": ([1, 2**70], f"{ROW} of 64 bits: .* too"),
    "one_number": (5, f"{ROW} of 64 bits: 'int' object is not"),
    "two_rows": ([[1], [2]], f"{ROW} of 64 bits: 'list' object cannot be"),
    "tensor_of_floats": (torch.ones(2), rf"{ROW}, not \(2,\) of torch.float32"),
    "empty_tensor_of_floats": (torch.ones(0), rf"{ROW}, not \(0,\) of torch.float32"),
    "tensor_of_bools": (torch.ones(2).bool(), rf"{ROW}, not \(2,\) of torch.bool"),
    "tensor_of_one_number": (torch.tensor(5), rf"{ROW}, not \(\) of torch.int64"),
    "tensor_of_two_rows": (torch.ones(2, 1).long(), rf"{ROW}, not \(2, 1\) of torch.int64"),
}


@pytest.mark.parametrize(("tokens", "message"), TOKENS.values(), ids=TOKENS)
def test_a_chunk_of_anything_but_a_row_of_integers_is_refused(
    kv_cache: PagedKVCache, tokens: Any, message: str
) -> None:
    first, second = KVSequence(), KVSequence()
    chunks = [Chunk(token_ids=[1], sequence=first), Chunk(token_ids=tokens, sequence=second)]
    with pytest.raises(BatchError, match=f"^request 1: token_ids {message}"):
        PrefillBatch.from_chunks(chunks, kv_cache)
    assert (first.pages, second.pages, kv_cache.free_pages) == ((), (), 31)


@pytest.mark.parametrize(("tokens", "message"), TOKENS.values(), ids=TOKENS)
def test_input_ids_of_anything_but_a_row_of_integers_are_refused(
    kv_cache: PagedKVCache, tokens: Any, message: str
) -> None:
    with pytest.raises(BatchError, match=f"^input_ids {message}"):
        PrefillBatch.build(input_ids=tokens, new_lens=[2], page_table=[[1]], kv_cache=kv_cache)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_tokens_of_any_integer_type_are_taken(kv_cache: PagedKVCache, dtype: torch.dtype) -> None:
    tokens = torch.tensor([3, 4], dtype=dtype)
    batch = PrefillBatch.from_chunks([Chunk(token_ids=tokens, sequence=KVSequence())], kv_cache)
    assert batch.input_ids_R.tolist() == [3, 4]
    assert batch.input_ids_R.dtype == torch.int64


@pytest.mark.parametrize(
    ("prefix", "message"),
    [(1.0, "is 1.0, but must be an integer"), ("1", "is '1', but must"), (2**70, "not fit 64")],
    ids=["float", "text", "beyond_64_bits"],
)
def test_a_prefix_length_that_is_no_integer_is_refused(
    kv_cache: PagedKVCache, prefix: Any, message: str
) -> None:
    sequence = written_sequence(kv_cache, 2)
    with pytest.raises(BatchError, match=f"^request 0: prefix_len .*{message}"):
        PrefillBatch.from_chunks(
            [Chunk(token_ids=[1], sequence=sequence, prefix_len=prefix)], kv_cache
        )


ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "float_length": ({"new_lens": [1, 2.0]}, "request 1: new_lens is 2.0, but must be an integer"),
    "text_length": ({"new_lens": ["1", 2]}, "request 0: new_lens is '1', but must be an integer"),
    "huge_length": ({"new_lens": [1, 2**70]}, "request 1: new_lens is .* does not fit 64 bits"),
    "one_length": ({"new_lens": 3}, "new_lens is 3, but must be integers, one a request"),
    "tensor_of_one_length": ({"new_lens": torch.tensor(3)}, f"new_lens {ROW}"),
    "tensor_of_float_lengths": ({"new_lens": torch.ones(2)}, f"new_lens {ROW}"),
    "float_prefix": ({"prefix_lens": [0.0, 0]}, "request 0: prefix_lens is 0.0, but must be"),
    "one_prefix": ({"prefix_lens": 0}, "prefix_lens is 0, but must be integers, one a request"),
    "float_page": ({"page_table": [[1], [2.0]]}, f"request 1: page table {ROW}"),
    "page_without_a_list": ({"page_table": [1, [2]]}, f"request 0: page table {ROW}"),
}


def build(kv_cache: PagedKVCache, **changes: Any) -> PrefillBatch:
    arguments = {"input_ids": [1, 2, 3], "new_lens": [1, 2], "page_table": [[1], [2]]}
    return PrefillBatch.build(kv_cache=kv_cache, **(arguments | changes))


@pytest.mark.parametrize(("changes", "message"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_of_anything_but_integers_are_refused(
    kv_cache: PagedKVCache, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=f"^{message}"):
        build(kv_cache, **changes)


def test_lengths_and_pages_may_be_tensors(kv_cache: PagedKVCache) -> None:
    batch = build(
        kv_cache,
        new_lens=torch.tensor([1, 2]),
        prefix_lens=torch.tensor([0, 1]),
        page_table=torch.tensor([[1], [2]]),
    )
    assert (batch.new_lens, batch.prefix_lens, batch.pages) == ((1, 2), (0, 1), ((1,), (2,)))


@pytest.mark.parametrize("row", [b"\x03\x04", range(3, 5), (3, 4), np.array([3, 4])], ids=type)
def test_tokens_may_be_any_row_of_integers(kv_cache: PagedKVCache, row: Any) -> None:
    assert build(kv_cache, input_ids=row, new_lens=[1, 1]).input_ids_R.tolist() == [3, 4]


# Arrays that come with sequences


def test_a_prefix_that_its_sequence_has_not_cached_is_refused(kv_cache: PagedKVCache) -> None:
    sequences = tuple(sequence_on(kv_cache, [page], cached=1) for page in (1, 2))
    with pytest.raises(BatchError, match=r"request 1: a prefix of 2 tokens .* 1 are cached"):
        build(kv_cache, prefix_lens=[1, 2], sequences=sequences)


def test_pages_that_its_sequence_does_not_hold_are_refused(kv_cache: PagedKVCache) -> None:
    sequences = tuple(sequence_on(kv_cache, [page]) for page in (1, 3))
    with pytest.raises(BatchError, match="request 1: its page table is not that of its sequence"):
        build(kv_cache, sequences=sequences)


def test_a_sequence_that_comes_twice_is_refused(kv_cache: PagedKVCache) -> None:
    sequence = sequence_on(kv_cache, [1])
    with pytest.raises(BatchError, match="request 1: its sequence is in the batch twice"):
        build(kv_cache, sequences=(sequence, sequence))
