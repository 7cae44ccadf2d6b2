"""Trials of one layer have the logits that are asked for, and leave the cache and its free pages as they were."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_backends.sdpa import SDPABackend
from bcg_core import BackendLimits, Chunk, KVSequence, PrefillBatch, TokenBuckets
from bcg_harness.budgets import judge
from bcg_harness.interleaving import interleave
from bcg_harness.layer_trial import LayerTrial
from bcg_harness.sharp_logits import LARGEST_LOGIT, measure_sharp
from bcg_harness.stage import Stage
from bcg_harness.testing import MaskBackend
from bcg_llama import PRESETS, LlamaModel, random_llama

# (cached, new) tokens of each request
LENGTHS = {
    "one_token": [(0, 1)],
    "one_token_behind_a_prefix": [(9, 1)],
    "several_requests": [(0, 5), (7, 3), (0, 1)],
}
MakeBatch = Callable[..., PrefillBatch]


class NotesLogits(MaskBackend):
    """Remember the largest logit that counted in the last call."""

    name = "notes-logits"

    def weights(self, logits_KGRS: Tensor, mask_RS: Tensor) -> Tensor:
        """Look, and go on."""
        self.largest = logits_KGRS.masked_fill(~mask_RS, float("-inf")).max().item()
        return super().weights(logits_KGRS, mask_RS)


class NotesResults(SDPABackend):
    """Remember the results of all calls."""

    name = "notes-results"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results: list[Tensor] = []

    def forward(self, *args: Any) -> Tensor:
        """Attend, and remember."""
        result = super().forward(*args)
        self.results.append(result.clone())
        return result


def stage_of(model: LlamaModel) -> Stage:
    stage = Stage(model, [], TokenBuckets([32]), page_size=32)
    stage.kv_cache.storage_L2PSKH.normal_(generator=torch.Generator().manual_seed(0))
    return stage


@pytest.fixture
def stage(small_model: LlamaModel) -> Stage:
    return stage_of(small_model)


def lay_out(stage: Stage, lengths: Sequence[tuple[int, int]]) -> PrefillBatch:
    """Return a batch whose keys and values are what the cache happens to hold."""
    chunks = []
    for prefix, new in lengths:
        sequence = KVSequence()
        stage.kv_cache.extend(sequence, prefix + new)
        stage.kv_cache.mark_written(sequence, prefix)
        chunks.append(Chunk(token_ids=[0] * new, sequence=sequence))
    return PrefillBatch.from_chunks(chunks, stage.kv_cache)


def backend_of(stage: Stage) -> NotesLogits:
    limits: BackendLimits = stage.runner.limits
    return NotesLogits(stage.spec, limits, stage.kv_cache.device)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_largest_logit_that_counts_is_the_one_asked_for(
    stage: Stage, lengths: Sequence[tuple[int, int]]
) -> None:
    backend = backend_of(stage)
    measure_sharp(stage, lay_out(stage, lengths), backend)
    assert backend.largest == pytest.approx(LARGEST_LOGIT, rel=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sharp_logits_of_a_right_backend_are_well_within_a_small_budget(
    stage: Stage, lengths: Sequence[tuple[int, int]]
) -> None:
    comparison = judge(measure_sharp(stage, lay_out(stage, lengths), backend_of(stage)))
    assert comparison.load < 0.5
    assert comparison.budget < 1e-3


def test_queries_stay_within_their_type_however_small_the_keys_are() -> None:
    model = random_llama(replace(PRESETS["tiny"], num_layers=1), dtype=torch.float16)
    stage = stage_of(model)
    stage.kv_cache.storage_L2PSKH.mul_(1e-4)
    comparison = judge(measure_sharp(stage, lay_out(stage, [(0, 1)]), backend_of(stage)))
    assert comparison.within


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_trial_leaves_the_cache_as_it_was(
    stage: Stage, lengths: Sequence[tuple[int, int]]
) -> None:
    batch, before = lay_out(stage, lengths), stage.kv_cache.storage_L2PSKH.clone()
    LayerTrial(batch, stage.model.spec, scale=stage.spec.scale).run(backend_of(stage))
    assert torch.equal(stage.kv_cache.storage_L2PSKH, before)


def next_pages(stage: Stage) -> list[int]:
    """Return all free pages in the order in which they are given."""
    everything = KVSequence()
    stage.kv_cache.extend(everything, stage.kv_cache.free_pages * stage.kv_cache.page_size)
    pages = list(everything.pages)
    stage.kv_cache.free(everything)
    return pages


def test_interleaved_batches_give_their_pages_back_in_order(stage: Stage) -> None:
    batch, before = lay_out(stage, [(0, 5)]), next_pages(stage)
    interleave(stage, batch, backend_of(stage), lambda: backend_of(stage))
    assert next_pages(stage) == before


def test_the_batch_in_between_has_no_nan_of_its_own_where_the_cache_is_full_of_it(
    stage: Stage,
) -> None:
    stage.reset(0, nan=True)
    twin = NotesResults(stage.spec, stage.runner.limits, stage.kv_cache.device)
    interleave(stage, lay_out(stage, [(0, 5)]), backend_of(stage), lambda: twin)
    assert [bool(result.isfinite().all()) for result in twin.results] == [True, True]
