"""A model is found by what it is called, with the tokens that go with it."""

import pytest
import torch

from bcg_core import CheckpointError
from bcg_harness import HarnessError, RandomTokens, resolve_model
from bcg_llama import PRESETS

FLOAT32, CPU = torch.float32, torch.device("cpu")


def test_a_preset_has_random_weights_by_seed() -> None:
    one, same, other = (
        resolve_model("tiny", dtype=FLOAT32, device=CPU, seed=seed).model for seed in (1, 1, 2)
    )
    assert one.config == PRESETS["tiny"]
    assert torch.equal(one.weights.embedding_VD, same.weights.embedding_VD)
    assert not torch.equal(one.weights.embedding_VD, other.weights.embedding_VD)


def test_dtype_is_taken() -> None:
    model = resolve_model("tiny", dtype=torch.float16, device=CPU).model
    assert model.spec.dtype == torch.float16


def test_an_unknown_model_is_refused_with_the_presets() -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model("no/such/model", dtype=FLOAT32, device=CPU)
    assert any("tiny-mqa" in note for note in caught.value.__notes__)


def test_tokens_are_random_without_a_text() -> None:
    resolved = resolve_model("tiny", dtype=FLOAT32, device=CPU)
    source = resolved.token_source(None, seed=3)
    assert source.tokens(0, 9) == RandomTokens(1024, seed=3).tokens(0, 9)


def test_a_text_needs_a_tokenizer() -> None:
    resolved = resolve_model("tiny", dtype=FLOAT32, device=CPU)
    with pytest.raises(HarnessError, match="has no tokenizer: leave out --text"):
        resolved.token_source("a text", seed=0)
