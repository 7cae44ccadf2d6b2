"""What a runner refuses before it launches anything.

Shape letters: R real tokens.
"""

import torch
from torch import Tensor

from bcg_core.batch import PrefillBatch
from bcg_core.batch_checks import check_unheld, check_written_alone
from bcg_core.breaks import active_recorder
from bcg_core.engine import SegmentEngine
from bcg_core.errors import BatchError, KVCacheError, NestedCaptureError
from bcg_core.kv_cache import PagedKVCache
from bcg_core.results import Mode
from bcg_core.spec import BackendLimits, ModelSpec


def check_cache(kv_cache: PagedKVCache, spec: ModelSpec) -> None:
    """Refuse a cache that does not hold keys and values of a model of ``spec``."""
    layers, _, _, _, heads, dim = kv_cache.storage_L2PSKH.shape
    dtype, device = kv_cache.storage_L2PSKH.dtype, kv_cache.device
    held = (layers, heads, dim, dtype)
    needed = (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype)
    if held != needed or not _same_device(device, spec.device):
        raise KVCacheError(
            f"the KV cache holds {_shape(*held, device)}, but the model needs {_shape(*needed, spec.device)}: "
            "make the cache from the model's spec"
        )


def _shape(layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> str:
    return f"{layers} layers of {heads} KV heads of {dim} elements, {dtype} on {device}"


def _same_device(one: torch.device, other: torch.device) -> bool:
    """Compare devices; one without an index may be any of its type."""
    return one.type == other.type and (
        one.index is None or other.index is None or one.index == other.index
    )


def check_engine(engine: SegmentEngine, kv_cache: PagedKVCache) -> None:
    """Refuse an engine that records work of another device: it would see none, and replay nothing."""
    if not _same_device(engine.device, kv_cache.device):
        raise ValueError(
            f"the engine records work on {engine.device}, but the KV cache is on {kv_cache.device}: make the engine "
            "with engine_for(kv_cache.device)"
        )


def check_not_capturing(what: str) -> None:
    """Refuse ``what`` inside a capture."""
    if active_recorder.get() is not None:
        raise NestedCaptureError(
            f"{what} cannot be called inside a capture: a runner captures its segments by itself"
        )


def as_mode(mode: Mode | str) -> Mode:
    """Return the mode that ``mode`` is or names."""
    try:
        return Mode(mode)
    except ValueError:
        names = ", ".join(repr(known.value) for known in Mode)
        raise ValueError(f"mode {mode!r} does not exist: use one of {names}") from None


def check_batch(
    batch: PrefillBatch, kv_cache: PagedKVCache, spec: ModelSpec, limits: BackendLimits
) -> None:
    """Refuse a batch that was made for another cache or sequences as they were, or that does not fit the model.

    What does not fit gives back the pages that it took.
    """
    if batch.kv_cache is not kv_cache or batch.device != kv_cache.device:
        made_for = batch.kv_cache
        raise BatchError(
            f"the batch was made for another KV cache, of {made_for.num_pages} pages of {made_for.page_size} tokens on "
            f"{batch.device}; this runner's cache has {kv_cache.num_pages} of {kv_cache.page_size} on "
            f"{kv_cache.device}"
        )
    try:
        _check_fit(batch, spec, limits)
    except BatchError:
        batch.give_back()
        raise


def _check_fit(batch: PrefillBatch, spec: ModelSpec, limits: BackendLimits) -> None:
    if batch.num_requests > limits.max_requests:
        raise BatchError(
            f"{batch.num_requests} requests, at most {limits.max_requests} fit: "
            "split the batch, or raise max_requests"
        )
    check_unchanged(batch)
    if batch.sequences:
        check_written_alone(batch.pages, batch.prefix_lens, batch.kv_cache)
    else:
        check_unheld(batch.pages, batch.prefix_lens, batch.kv_cache)
    for number, length in enumerate(batch.kv_lens):
        if length > spec.max_positions:
            raise BatchError(
                f"request {number}: {length} tokens with its prefix, but the model's RoPE table has "
                f"{spec.max_positions} positions"
            )
    row = _first_outside(batch.input_ids_R, spec.vocab_size)
    if row is not None:
        owner = next(b for b, end in enumerate(batch.cu_new_lens[1:]) if row < end)
        raise BatchError(
            f"request {owner}: token id {int(batch.input_ids_R[row])} is not in the vocabulary of {spec.vocab_size}"
        )


def check_unchanged(batch: PrefillBatch) -> None:
    """Refuse a batch whose sequences are not what they were when it was made."""
    for number, (sequence, prefix, pages) in enumerate(
        zip(batch.sequences, batch.prefix_lens, batch.pages, strict=False)
    ):
        held = sequence._pages
        if prefix > sequence._cached or (held is not pages and held[: len(pages)] != pages):
            raise BatchError(
                f"request {number}: made before its sequence changed; build the batch again"
            )


def _first_outside(ids_R: Tensor, vocab_size: int) -> int | None:
    """Return the first row whose token id is not in ``[0, vocab_size)``; None when all are."""
    if not len(ids_R) or (int(ids_R.min()) >= 0 and int(ids_R.max()) < vocab_size):
        return None
    return int(((ids_R < 0) | (ids_R >= vocab_size)).nonzero()[0])
