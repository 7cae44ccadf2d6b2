"""Every arm starts from the same poisoned, fragmented state."""

import pytest
import torch

from bcg_core import Mode, TokenBuckets
from bcg_harness import Case, RandomTokens, Step
from bcg_harness.budgets import judge
from bcg_harness.probe import Probe
from bcg_harness.stage import Stage
from bcg_harness.testing import MaskBackend
from bcg_llama import LlamaModel

CASE = Case(
    name="chunks",
    description="",
    steps=(Step(requests=((0, 40), (1, 5))), Step(requests=((0, 20),))),
)


@pytest.fixture
def stage(small_model: LlamaModel) -> Stage:
    stage = Stage(small_model, [CASE], TokenBuckets([16, 64]))
    stage.reset(seed=1)
    return stage


@pytest.fixture
def source(small_model: LlamaModel) -> RandomTokens:
    return RandomTokens(small_model.spec.vocab_size)


@pytest.fixture
def probe(stage: Stage) -> Probe:
    stage.capture()
    runner = stage.runner
    backend = MaskBackend(stage.spec, runner.limits, runner.model.spec.device)
    return stage.use(Probe(backend))


def test_pages_are_not_contiguous(stage: Stage, source: RandomTokens) -> None:
    batch = stage.batch(CASE.steps[0], source)
    pages = batch.page_table_BW[0].tolist()
    assert pages != list(range(pages[0], pages[0] + len(pages)))


def test_unwritten_slots_hold_finite_garbage(stage: Stage) -> None:
    storage = stage.kv_cache.storage_L2PSKH
    assert storage.isfinite().all()
    assert (storage != 0).all()


def test_unwritten_slots_hold_nan_where_that_is_stood(stage: Stage) -> None:
    stage.reset(seed=1, nan=True)
    assert stage.kv_cache.storage_L2PSKH.isnan().any(-1).all()


def test_arithmetic_in_unwritten_slots_shows_where_they_hold_nan(stage: Stage) -> None:
    stage.reset(seed=1, nan=True)
    assert stage.kv_cache.storage_L2PSKH.isfinite().any(-1).all()


def test_the_same_seed_gives_the_same_start(stage: Stage, source: RandomTokens) -> None:
    before = stage.kv_cache.storage_L2PSKH.clone()
    pages = stage.batch(CASE.steps[0], source).page_table_BW
    stage.reset(seed=1)
    assert torch.equal(stage.kv_cache.storage_L2PSKH, before)
    assert torch.equal(stage.batch(CASE.steps[0], source).page_table_BW, pages)


def test_a_case_can_be_run_many_times_in_its_cache(stage: Stage, source: RandomTokens) -> None:
    for seed in range(5):
        stage.reset(seed)
        stage.batch(CASE.steps[0], source)


def test_a_sequence_goes_on_behind_its_cached_tokens(
    stage: Stage, source: RandomTokens, probe: Probe
) -> None:
    stage.run(stage.batch(CASE.steps[0], source), Mode.BREAKABLE, probe)
    batch = stage.batch(CASE.steps[1], source)
    assert batch.prefix_lens == (40,)
    assert batch.input_ids_R.tolist() == source.tokens(0, 60)[40:]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, None)])
def test_the_expected_bucket_is_the_smallest_that_fits(
    small_model: LlamaModel, source: RandomTokens, tokens: int, bucket: int | None
) -> None:
    step = Step(requests=((0, tokens),))
    case = Case(name="one", description="", steps=(step,))
    stage = Stage(small_model, [case], TokenBuckets([16, 64]))
    stage.reset(seed=1)
    assert stage.expected_bucket(stage.batch(step, source)) == bucket


def test_backends_are_made_for_more_than_any_case_needs(stage: Stage) -> None:
    assert stage.runner.limits.max_requests == 256
    assert stage.runner.limits.num_pages > 1 + 60 // 16 + 1 + 1


def test_backends_are_made_for_a_case_of_very_many_requests(small_model: LlamaModel) -> None:
    step = Step(requests=tuple((i, 1) for i in range(300)))
    case = Case(name="crowd", description="", steps=(step,))
    stage = Stage(small_model, [case], TokenBuckets([16]))
    assert stage.runner.limits.max_requests == 300


def test_an_arm_counts_what_the_runner_did(
    stage: Stage, source: RandomTokens, probe: Probe
) -> None:
    arm = stage.run(stage.batch(CASE.steps[0], source), Mode.BREAKABLE, probe)
    assert (arm.replays, arm.fallbacks, arm.model_forwards) == ({64: 1}, {}, 0)
    assert arm.trace.layers == [0, 1]
    assert arm.trace.rows == [45, 45]


def test_an_arm_keeps_the_padded_rows(stage: Stage, source: RandomTokens, probe: Probe) -> None:
    arm = stage.run(stage.batch(CASE.steps[0], source), Mode.PADDED_EAGER, probe)
    assert arm.hidden_TD.shape[0] == 64
    assert arm.hidden_RD.shape[0] == 45
    assert arm.padded_inputs.shape == (3, 19)


def test_rows_beyond_the_bucket_stay_poisoned(
    stage: Stage, source: RandomTokens, probe: Probe
) -> None:
    batch = stage.batch(Step(requests=((0, 3),)), source)
    arm = stage.run(batch, Mode.BREAKABLE, probe)
    assert arm.out_MX[:16].isfinite().all()
    assert arm.out_MX[16:].isnan().all()


def test_only_a_judging_arm_compares_with_the_oracle(
    stage: Stage, source: RandomTokens, probe: Probe
) -> None:
    batch = stage.batch(CASE.steps[0], source)
    assert stage.run(batch, Mode.BREAKABLE, probe).trace.measured == []
    judged = stage.run(batch, Mode.BREAKABLE, probe, judge=True).trace
    assert len(judged.measured) == 2 * 2  # layers and requests
    assert judge(judged.measured).within
