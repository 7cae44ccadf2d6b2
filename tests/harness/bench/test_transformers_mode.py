"""The same weights in transformers: shared storage, results of eager prefill, and the choice of attention.

Shape letters: B requests, N query heads, K KV heads, S new tokens, H head dim, R new tokens of all requests.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bcg_harness.bench import transformers_mode
from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.bench.transformers_mode import TransformersEager
from bcg_harness.bench.transformers_model import TransformersLlama
from bcg_harness.errors import HarnessError
from bcg_harness.testing.mode_trial import ModeTrial
from bcg_llama import PRESETS, LlamaModel, RopeConfig, random_llama

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.modeling_utils")

COMPOSITIONS = {
    "single": [[(0, 13)]],
    "one-token": [[(0, 1)]],
    "several": [[(0, 20), (1, 5), (2, 30)]],
    "different-prefixes": [[(0, 20), (1, 7)], [(0, 3), (1, 9), (2, 12)]],
    "equal-prefixes": [[(0, 20), (1, 20)], [(0, 3), (1, 9)]],
    "chunked": [[(0, 30)], [(0, 30)], [(0, 5)]],
    "up-to-the-end-of-the-context": [[(0, 500), (1, 100)], [(0, 12), (1, 20)]],
}
Steps = list[list[tuple[int, int]]]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return random_llama(replace(PRESETS["tiny"], num_layers=2, max_positions=512))


@pytest.fixture
def trial(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> ModeTrial:
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", ("sdpa",))
    return ModeTrial(model, TransformersEager)


@pytest.mark.parametrize("steps", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_logits_are_those_of_eager(steps: Steps, trial: ModeTrial) -> None:
    step = [trial.step(*requests) for requests in steps][-1]
    torch.testing.assert_close(step.result.logits_BV, step.logits_BV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_tokens_count_as_cached(steps: Steps, trial: ModeTrial) -> None:
    step = [trial.step(*requests) for requests in steps][-1]
    totals = {number: 0 for number, _ in steps[-1]}
    for number, tokens in (request for requests in steps for request in requests):
        if number in totals:
            totals[number] += tokens
    assert step.cached == tuple(totals.values())


def test_the_paged_cache_is_not_written(trial: ModeTrial) -> None:
    batch, storage = trial.batch((0, 13)), trial.ground.kv_cache.storage_L2PSKH
    storage.fill_(7.0)
    trial.mode.prefill(batch)
    assert torch.equal(storage, torch.full_like(storage, 7.0))


def test_garbage_outside_the_prefixes_is_not_seen(trial: ModeTrial) -> None:
    trial.step((0, 20), (1, 7))
    trial.ground.kv_cache.storage_L2PSKH[:, :, 0] = float("nan")
    step = trial.step((0, 3), (1, 9))
    torch.testing.assert_close(step.result.logits_BV, step.logits_BV, rtol=1e-5, atol=1e-5)


def test_next_tokens_are_the_most_likely(trial: ModeTrial) -> None:
    step = trial.step((0, 20), (1, 5))
    assert torch.equal(step.result.next_tokens_B, step.logits_BV.argmax(-1))


def test_rows_are_counted_with_their_padding(trial: ModeTrial) -> None:
    result = trial.step((0, 20), (1, 5)).result
    assert (result.padded_tokens, result.served_by) == (40, "transformers, sdpa")


def test_a_prefix_must_be_staged(trial: ModeTrial) -> None:
    trial.step((0, 20))
    with pytest.raises(AssertionError, match="stage"):
        trial.mode.prefill(trial.batch((0, 3)))


def test_what_was_staged_serves_one_prefill(trial: ModeTrial) -> None:
    trial.step((0, 20))
    batch = trial.batch((0, 3))
    trial.mode.stage(batch)
    trial.mode.prefill(batch)
    with pytest.raises(AssertionError, match="stage"):
        trial.mode.prefill(batch)


def test_a_batch_without_requests_is_refused(trial: ModeTrial) -> None:
    assert trial.mode.refuses(trial.batch()) is not None
    assert trial.mode.refuses(trial.batch((0, 1))) is None


def test_another_backend_needs_no_other_preparation(trial: ModeTrial) -> None:
    setup = trial.mode.prepare(trial.make_backend(), "another")
    assert setup == ModeSetup(backend=NO_BACKEND, mode=TransformersEager.name)


def test_transformers_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    reason = TransformersEager.unavailable(torch.device("cpu"))
    assert reason is not None
    assert "pip install 'breakable-cuda-graph[hf]'" in reason


def test_nothing_is_missing_where_transformers_is_installed() -> None:
    assert TransformersEager.unavailable(torch.device("cpu")) is None


# The model


@pytest.mark.parametrize(
    "preset", ["tiny-bias", "tiny-tied", "tiny-odd", "tiny-linear", "tiny-llama3", "tiny-yarn"]
)
def test_every_kind_of_llama_is_the_same(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", ("sdpa",))
    step = ModeTrial(random_llama(PRESETS[preset]), TransformersEager).step((0, 300), (1, 20))
    torch.testing.assert_close(step.result.logits_BV, step.logits_BV, rtol=1e-4, atol=1e-4)


def test_frequency_divisors_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", ("sdpa",))
    rope = RopeConfig(divisors=tuple(1.0 + pair / 4 for pair in range(32)))
    model = random_llama(replace(PRESETS["tiny"], num_layers=2, rope=rope))
    step = ModeTrial(model, TransformersEager).step((0, 100))
    torch.testing.assert_close(step.result.logits_BV, step.logits_BV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("preset", ["tiny-bias", "tiny-tied"])
def test_every_weight_shares_its_storage(preset: str) -> None:
    ours = random_llama(PRESETS[preset])
    theirs = TransformersLlama(ours).causal_lm
    parameters = dict(theirs.named_parameters())
    expected = {name: tensor.data_ptr() for name, tensor in ours.named_tensors()}
    assert {name: tensor.data_ptr() for name, tensor in parameters.items()} == expected
    assert theirs.lm_head.weight.data_ptr() == ours.weights.head_VD.data_ptr()


def test_nothing_is_left_without_memory(model: LlamaModel) -> None:
    theirs = TransformersLlama(model).causal_lm
    tensors = [*theirs.named_parameters(), *theirs.named_buffers()]
    assert [name for name, tensor in tensors if tensor.is_meta] == []


# The choice of attention


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return the times that attention "takes", by name; both of these work."""
    taken = {"sdpa": 2.0, "eager": 1.0}
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", tuple(taken))
    monkeypatch.setattr(
        TransformersEager, "_time", lambda mode, batch: taken[mode._model.implementation]
    )
    return taken


@pytest.mark.parametrize("fastest", ["sdpa", "eager"])
def test_the_fastest_attention_is_taken(
    fastest: str, times: dict[str, float], model: LlamaModel
) -> None:
    times[fastest] = 0.5
    trial = ModeTrial(model, TransformersEager)
    assert trial.step((0, 9)).result.served_by == f"transformers, {fastest}"
    assert trial.mode.notes()[0].startswith(f"attention: {fastest} (tried: sdpa")


@pytest.mark.usefixtures("times")
def test_wrong_attention_is_not_taken(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def averages(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return values.mean(2, keepdim=True).expand_as(query).transpose(1, 2).contiguous(), None

    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.eager_attention_forward", averages
    )
    trial = ModeTrial(model, TransformersEager)
    assert trial.step((0, 9)).result.served_by == "transformers, sdpa"
    assert any(note.startswith("eager: wrong") for note in trial.mode.notes())


def test_attention_that_is_not_there_is_noted(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", ("sdpa", "no_such_attention"))
    notes = ModeTrial(model, TransformersEager).mode.notes()
    assert any(note.startswith("no_such_attention: not usable here: ") for note in notes)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_library_that_is_not_installed_is_noted(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", ("sdpa", "flash_attention_2"))
    notes = ModeTrial(model, TransformersEager).mode.notes()
    assert notes[1:] == ["flash_attention_2: its library is not installed"]


def test_no_attention_at_all_is_an_error(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", ("no_such_attention",))
    with pytest.raises(HarnessError, match="no_such_attention: not usable here"):
        ModeTrial(model, TransformersEager)


def flash_stand_in(
    module: Any,
    query_BNSH: Tensor,
    key_BKSH: Tensor,
    value_BKSH: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as flash attention does: to the requests that the offsets tell apart, if there are any."""
    assert attention_mask is None
    new, total = query_BNSH.shape[2], key_BKSH.shape[2]
    offsets = [0, new] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    parts = []
    for start, stop in pairwise(offsets):
        span = slice(start, stop if cu_seq_lens_q is not None else total)
        parts.append(
            F.scaled_dot_product_attention(
                query_BNSH[:, :, start:stop],
                key_BKSH[:, :, span],
                value_BKSH[:, :, span],
                attn_mask=torch.ones(stop - start, span.stop - start, dtype=torch.bool).tril(
                    total - new
                ),
                enable_gqa=True,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


@pytest.fixture
def flash_trial(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> ModeTrial:
    functions = modeling.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(functions._global_mapping, "flash_stand_in", flash_stand_in)
    monkeypatch.setattr(transformers_mode, "IMPLEMENTATIONS", ("flash_stand_in",))

    def use(llama: TransformersLlama, name: str) -> None:
        # The public way wants a package for every name that begins like this.
        llama.causal_lm.config._attn_implementation_internal = name

    monkeypatch.setattr(TransformersLlama, "use", use)
    return ModeTrial(model, TransformersEager)


@pytest.mark.parametrize(
    ("steps", "rows"),
    [
        pytest.param([[(0, 13)]], 13, id="single"),
        pytest.param([[(0, 20), (1, 5), (2, 30)]], 55, id="several-are-packed"),
        pytest.param([[(0, 20), (1, 20)], [(0, 3), (1, 9)]], 18, id="prefixes-are-padded"),
    ],
)
def test_flash_attention_gets_batches_packed(
    steps: Steps, rows: int, flash_trial: ModeTrial
) -> None:
    step = [flash_trial.step(*requests) for requests in steps][-1]
    torch.testing.assert_close(step.result.logits_BV, step.logits_BV, rtol=1e-5, atol=1e-5)
    assert step.result.padded_tokens == rows
