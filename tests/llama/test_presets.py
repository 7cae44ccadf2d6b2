"""Built-in shapes: what they promise, and that nobody can change them."""

from dataclasses import replace

import pytest
import torch

from bcg_core import PagedKVCache, PrefillRunner
from bcg_llama import PRESETS, LlamaConfig, LlamaWeights, random_llama

TINY = [name for name in PRESETS if name.startswith("tiny")]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("smollm2-135m", 134_515_008), ("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248)],
)
def test_preset_has_as_many_parameters_as_the_published_model(name: str, parameters: int) -> None:
    meta = torch.device("meta")
    weights = LlamaWeights.empty(PRESETS[name], dtype=torch.bfloat16, device=meta)
    assert sum(tensor.numel() for _, tensor in weights.named_tensors()) == parameters


LLAMA_3_2_1B = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
}
LLAMA_3_1_8B = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
}


@pytest.mark.parametrize(
    ("name", "published"), [("llama-1b", LLAMA_3_2_1B), ("llama-8b", LLAMA_3_1_8B)]
)
def test_preset_is_what_the_published_configuration_says(
    name: str, published: dict[str, object]
) -> None:
    raw = {
        "model_type": "llama",
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        **published,
    }
    assert LlamaConfig.from_hf(raw) == PRESETS[name]


def test_the_kv_cache_bounds_a_long_context() -> None:
    model = random_llama(replace(PRESETS["tiny"], max_positions=131072))
    kv_cache = PagedKVCache(model.spec, num_pages=9, page_size=16)
    runner = PrefillRunner(model, kv_cache, "sdpa", buckets=[16])
    assert runner.limits.max_context == 8 * 16


def test_presets_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        PRESETS["tiny"] = PRESETS["llama-1b"]  # type: ignore[index]


def values(field: str) -> set[object]:
    return {getattr(PRESETS[name], field) for name in TINY}


@pytest.mark.parametrize(
    ("field", "covered"),
    [
        ("head_dim", {64, 128}),
        ("tie_word_embeddings", {True, False}),
        ("attention_bias", {True, False}),
        ("mlp_bias", {True, False}),
    ],
)
def test_tiny_presets_cover(field: str, covered: set[object]) -> None:
    assert values(field) >= covered


def test_tiny_presets_cover_every_kind_of_rope() -> None:
    kinds = {PRESETS[name].rope.rope_type for name in TINY}
    assert kinds == {"default", "linear", "llama3", "yarn"}


def test_tiny_presets_cover_head_groups() -> None:
    def group(config: LlamaConfig) -> int:
        return config.num_heads // config.num_kv_heads

    groups = {group(PRESETS[name]) for name in TINY}
    assert groups >= {1, 3, 4}
    assert PRESETS["tiny-mqa"].num_kv_heads == 1


def test_a_tiny_vocabulary_is_odd() -> None:
    assert PRESETS["tiny-odd"].vocab_size % 2 == 1
