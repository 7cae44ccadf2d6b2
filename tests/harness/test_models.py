"""A model is found by what it is called, with the tokens that go with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bcg_core import CheckpointError
from bcg_harness import HarnessError, RandomTokens, models, resolve_model
from bcg_harness.memory import has_to_fit
from bcg_llama import PRESETS, CheckpointWarning

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
    assert "; built-in models are tiny, " in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), id="cuda"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), id="cpu"),
        pytest.param(MemoryError(), id="python"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def make(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(models, "random_llama", make)
    with pytest.raises(HarnessError, match="does not fit in memory: choose a smaller model"):
        resolve_model("tiny", dtype=FLOAT32, device=CPU)


def test_torch_says_so_when_there_is_no_memory() -> None:
    with (
        pytest.raises(HarnessError, match="it does not fit"),
        has_to_fit("it", hint="take less"),
    ):
        torch.empty(2**60, dtype=torch.uint8)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="size"), has_to_fit("it", hint="take less"):
        torch.empty(2) @ torch.empty(3)


def test_tokens_are_random_without_a_text() -> None:
    resolved = resolve_model("tiny", dtype=FLOAT32, device=CPU)
    source = resolved.token_source(None, seed=3)
    assert source.tokens(0, 9) == RandomTokens(1024, seed=3).tokens(0, 9)


def test_a_text_needs_a_tokenizer() -> None:
    resolved = resolve_model("tiny", dtype=FLOAT32, device=CPU)
    with pytest.raises(HarnessError, match="has no tokenizer: leave out --text"):
        resolved.token_source("a text", seed=0)


def test_a_warning_about_a_checkpoint_arrives(tmp_path: Path) -> None:
    model = resolve_model("tiny", dtype=FLOAT32, device=CPU).model
    shape = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    counts = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    raw = {"model_type": "llama", "attn_bonus": 2, **shape, **counts}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    named = {name: tensor.clone() for name, tensor in model.named_tensors()}
    save_file(named, tmp_path / "model.safetensors")
    with pytest.warns(CheckpointWarning, match="nothing here reads attn_bonus"):
        resolve_model(str(tmp_path), dtype=FLOAT32, device=CPU)
