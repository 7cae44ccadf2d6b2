"""Loading Hugging Face directories: one file or shards, dtypes, limits, tied heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_llama import PRESETS, LlamaModel, load_llama, random_llama


@pytest.fixture
def model() -> LlamaModel:
    return random_llama(PRESETS["tiny-bias"])


def same(first: LlamaModel, second: LlamaModel) -> bool:
    pairs = zip(first.named_tensors(), second.named_tensors(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_come_back(shards: int, model: LlamaModel, write_directory: Any) -> None:
    assert same(load_llama(write_directory(model, shards=shards)), model)


@pytest.mark.parametrize("preset", sorted(n for n in PRESETS if n.startswith("tiny")))
def test_configuration_comes_back(preset: str, write_directory: Any) -> None:
    path = write_directory(random_llama(PRESETS[preset]))
    assert load_llama(path).config == PRESETS[preset]


def test_what_transformers_saves_gives_its_logits(
    tmp_path: Path, ids: Tensor, logits: Any, hf_dict: Any, error_of: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**hf_dict(PRESETS["tiny-llama3"]))
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    assert error_of(logits(load_llama(tmp_path), ids), expected) <= 1e-4


def test_path_may_be_text(model: LlamaModel, write_directory: Any) -> None:
    assert same(load_llama(str(write_directory(model))), model)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_comes_from_the_configuration(
    key: str, model: LlamaModel, write_directory: Any
) -> None:
    path = write_directory(model, config={key: "bfloat16"})
    assert load_llama(path).spec.dtype == torch.bfloat16


def test_dtype_comes_from_the_weights_when_not_configured(write_directory: Any) -> None:
    path = write_directory(random_llama(PRESETS["tiny"], dtype=torch.float16))
    assert load_llama(path).spec.dtype == torch.float16


def test_dtype_asked_for_wins(model: LlamaModel, write_directory: Any) -> None:
    path = write_directory(model, config={"dtype": "float16"})
    assert load_llama(path, dtype=torch.bfloat16).spec.dtype == torch.bfloat16


@pytest.mark.parametrize(("asked", "got"), [(100, 100), (10**6, 2048), (None, 2048)])
def test_max_positions_is_a_cap(
    asked: int | None, got: int, model: LlamaModel, write_directory: Any
) -> None:
    assert load_llama(write_directory(model), max_positions=asked).spec.max_positions == got


def test_capped_positions_do_not_change_the_rope(
    ids: Tensor, logits: Any, write_directory: Any
) -> None:
    model = random_llama(PRESETS["tiny-yarn"])
    capped = load_llama(write_directory(model), max_positions=300)
    assert torch.equal(logits(capped, ids), logits(model, ids))


def test_progress_counts_every_tensor(model: LlamaModel, write_directory: Any) -> None:
    calls: list[tuple[int, int]] = []
    load_llama(write_directory(model), progress=lambda done, total: calls.append((done, total)))
    total = len(dict(model.named_tensors()))
    assert calls == [(done, total) for done in range(1, total + 1)]


def test_stored_rope_frequencies_are_ignored(model: LlamaModel, write_directory: Any) -> None:
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
    assert same(load_llama(write_directory(model, tensors=spare)), model)


def test_tied_head_may_be_stored(write_directory: Any) -> None:
    model = random_llama(PRESETS["tiny-tied"])
    path = write_directory(model, tensors={"lm_head.weight": model.weights.head_VD})
    assert same(load_llama(path), model)


def test_tied_head_may_be_left_out(write_directory: Any) -> None:
    model = random_llama(PRESETS["tiny-tied"])
    assert load_llama(write_directory(model)).weights.head_VD.shape == (1024, 128)
