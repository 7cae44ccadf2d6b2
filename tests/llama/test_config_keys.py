"""Keys of a configuration that change results: served, refused by name, or named in a warning."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama import PRESETS, CheckpointWarning, LlamaConfig, RopeConfig, load_llama, random_llama
from bcg_llama.hf_keys import UNSERVED, unknown_keys

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}

CHANGING: dict[str, list[Any]] = {
    "hidden_act": ["gelu", "relu2"],
    "hidden_activation": ["gelu_pytorch_tanh"],
    "activation_function": ["gelu_new"],
    "sliding_window": [1, 2047, True, "2048"],
    "attention_chunk_size": [512],
    "layer_types": [["full_attention", "sliding_attention"]],
    "is_causal": [False],
    "use_bidirectional_attention": [True],
    "attention_multiplier": [0.0078125],
    "query_pre_attn_scalar": [256],
    "attn_logit_softcapping": [50.0],
    "final_logit_softcapping": [30.0],
    "clip_qkv": [8.0],
    "qk_norm": [True],
    "use_qk_norm": [True],
    "qk_layernorm": [True],
    "use_qk_layernorm": [True],
    "qkv_bias": [True],
    "use_qkv_bias": [True],
    "attn_temperature_tuning": [True, 4],
    "rotary_pct": [0.25],
    "rope_ratio": [2],
    "rope_interleave": [True],
    "rope_interleaved": [True],
    "rope_local_base_freq": [10000.0],
    "no_rope_layers": [[1, 1, 1, 0]],
    "no_rope_layer_interval": [4],
    "nope_layer_interval": [4],
    "position_embedding_type": ["alibi", "absolute"],
    "alibi": [True],
    "use_alibi": [True],
    "embedding_multiplier": [12.0],
    "scale_emb": [12],
    "scale_embedding": [True],
    "residual_multiplier": [0.22],
    "residual_scale": [0.5],
    "key_multiplier": [0.5],
    "lm_head_multiplier": [0.02],
    "logit_scale": [0.0625],
    "logits_scaling": [8.0],
    "output_multiplier_scale": [0.577],
    "scale_depth": [1.4, 1],
    "dim_model_base": [256],
    "use_mup": [True],
    "mup_enabled": [True],
    "num_experts": [8],
    "num_local_experts": [8],
    "n_routed_experts": [64],
    "parallel_attn": [True],
    "use_parallel_residual": [True],
    "num_kv_shared_layers": [2],
}

HARMLESS: dict[str, list[Any]] = {
    "hidden_act": ["silu", "swish"],
    "sliding_window": [2048, 4096],
    "attention_chunk_size": [8192],
    "layer_types": [["full_attention"] * 4],
    "is_causal": [True],
    "attention_multiplier": [0.25],
    "query_pre_attn_scalar": [16],
    "use_qk_norm": [False],
    "rotary_pct": [1, 1.0],
    "rope_interleaved": [False],
    "no_rope_layers": [[1, 1, 1, 1]],
    "position_embedding_type": ["rope"],
    "embedding_multiplier": [1.0],
    "scale_embedding": [False],
    "scale_depth": [2.0],
    "dim_model_base": [64],
    "num_local_experts": [0, 1],
    "attention_dropout": [0.1],
    "pretraining_tp": [2],
    "use_cache": [False],
}


def each(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(key, value, id=f"{key}={value}")
        for key, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("key", "value"), each(CHANGING))
def test_a_key_that_changes_results_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"^{key} is .*: only .* can be served, as "):
        LlamaConfig.from_hf({**BASE, key: value})


@pytest.mark.parametrize(("key", "value"), each(HARMLESS))
def test_a_key_at_a_harmless_value_is_served(key: str, value: Any) -> None:
    assert LlamaConfig.from_hf({**BASE, key: value}) == LlamaConfig.from_hf(BASE)


@pytest.mark.parametrize("key", CHANGING)
def test_null_is_harmless(key: str) -> None:
    assert LlamaConfig.from_hf({**BASE, key: None}) == LlamaConfig.from_hf(BASE)


def test_every_refused_key_is_tried() -> None:
    assert UNSERVED.keys() == CHANGING.keys()


def test_a_window_that_is_switched_off_is_harmless() -> None:
    fields = {"sliding_window": 512, "use_sliding_window": False}
    assert LlamaConfig.from_hf({**BASE, **fields}) == LlamaConfig.from_hf(BASE)


def test_the_refusal_of_a_window_says_how_to_serve_what_fits_it() -> None:
    with pytest.raises(CheckpointError, match="max_position_embeddings lowered to the window"):
        LlamaConfig.from_hf({**BASE, "sliding_window": 512})


MISTRAL = {**BASE, "model_type": "mistral", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"sliding_window": 1024}, id="window"),
        pytest.param({"max_position_embeddings": 8192}, id="window-of-4096-left-out"),
        pytest.param({"max_position_embeddings": None}, id="no-context"),
    ],
)
def test_a_mistral_that_calls_itself_a_llama_is_refused_for_its_window(
    fields: dict[str, Any],
) -> None:
    raw = {key: value for key, value in {**MISTRAL, **fields}.items() if value is not None}
    with pytest.raises(CheckpointError, match=r"^sliding_window is "):
        LlamaConfig.from_hf({**raw, "num_key_value_heads": 4})


def test_a_mistral_without_a_window_is_a_llama() -> None:
    fields = {"sliding_window": None, "num_key_value_heads": 4}
    assert LlamaConfig.from_hf({**MISTRAL, **fields}) == LlamaConfig.from_hf(BASE)


def test_a_mistral_that_names_no_kv_heads_has_eight() -> None:
    wide = {"hidden_size": 128, "num_attention_heads": 16, "sliding_window": None}
    assert LlamaConfig.from_hf({**MISTRAL, **wide}).num_kv_heads == 8


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        pytest.param(
            {"rope_scaling": {"factor": 4.0}},
            "rope_scaling has factor 4.0, but rope_type 'default' .*name the rope_type .*linear",
            id="factor-without-a-type",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "default", "factor": 2}},
            "rope_parameters has factor 2",
            id="factor-of-the-default",
        ),
        pytest.param(
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            r"rope_parameters differs by the type of layer \(full_attention, sliding_attention\)",
            id="by-layer",
        ),
    ],
)
def test_a_rope_that_would_be_overlooked_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LlamaConfig.from_hf({**BASE, **rope})


def test_a_compressed_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="weights are quantised"):
        LlamaConfig.from_hf({**BASE, "compression_config": {"format": "pack-quantized"}})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param({"rope_wobble": 3}, ["rope_wobble"], id="rope"),
        pytest.param({"mlp_scale": 2.0}, ["mlp_scale"], id="scale"),
        pytest.param({"x_scaling_y": 1}, ["x_scaling_y"], id="scaling"),
        pytest.param({"sliding_stride": 8}, ["sliding_stride"], id="sliding"),
        pytest.param({"attn_bonus": 0.5}, ["attn_bonus"], id="attn"),
        pytest.param({"attn_bonus": None, "rope_wobble": False}, [], id="switched-off"),
        pytest.param({"attn_implementation": "sdpa", "hidden_dropout": 0.1}, [], id="known"),
        pytest.param({"rope_theta": 1e6, "rope_scaling": None, "alibi": False}, [], id="read"),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2.0, "extrapolation": 1, "beta_fast": 8}},
            ["rope_scaling.beta_fast", "rope_scaling.extrapolation"],
            id="unused-by-the-rope",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "yarn", "beta_fast": 8, "attn_factor": 2}},
            ["rope_parameters.attn_factor"],
            id="used-by-yarn",
        ),
    ],
)
def test_unknown_keys_that_sound_as_if_they_mattered(
    fields: dict[str, Any], named: list[str]
) -> None:
    assert unknown_keys({**BASE, **fields}) == named


def test_a_warning_names_unknown_keys_and_says_what_to_do(write_directory: Any) -> None:
    path = write_directory(
        random_llama(PRESETS["tiny"]), config={"attn_bonus": 2, "rope_wobble": 1}
    )
    message = "config.json: nothing here reads attn_bonus, rope_wobble: .* compare some with"
    with pytest.warns(CheckpointWarning, match=message):
        load_llama(path)


def test_a_llama_that_calls_itself_a_mistral_has_the_logits_of_transformers(
    ids: Tensor, logits: Any, error_of: Any, write_directory: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "mistral", "sliding_window": 4096}
    path = write_directory(random_llama(PRESETS["tiny"]), config=config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(reference).__name__ == "MistralForCausalLM"
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    assert error_of(logits(load_llama(path), ids), expected) <= 1e-4


def test_a_window_would_have_changed_the_logits(
    ids: Tensor, logits: Any, error_of: Any, write_directory: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    model = random_llama(PRESETS["tiny"])
    path = write_directory(model, config={"model_type": "mistral", "sliding_window": 16})
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    assert error_of(logits(model, ids), expected) > 1e-2
    with pytest.raises(CheckpointError, match=r"config\.json: sliding_window is 16"):
        load_llama(path)


V4_ROPES = {
    "linear": {"type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@pytest.mark.parametrize("kind", V4_ROPES)
def test_a_rope_in_the_spelling_of_transformers_4_has_its_logits(
    kind: str, ids: Tensor, logits: Any, error_of: Any, write_directory: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": V4_ROPES[kind]}
    path = write_directory(random_llama(PRESETS["tiny"]), config=config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    loaded = load_llama(path)
    assert loaded.config.rope != RopeConfig(theta=5e5)
    assert error_of(logits(loaded, ids), expected) <= 1e-4
