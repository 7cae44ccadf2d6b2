"""Reading ``config.json`` in all its spellings, and refusing what cannot be served."""

from typing import Any

import pytest
import torch

from bcg_core.errors import CheckpointError
from bcg_llama import LlamaConfig, RopeConfig

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LLAMA3_ROPE = RopeConfig(rope_type="llama3", theta=5e5, factor=8.0, original_max_positions=1024)


def test_missing_fields_take_the_defaults_of_transformers() -> None:
    config = LlamaConfig.from_hf(BASE)
    assert config == LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_positions=2048,
    )


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        pytest.param({}, RopeConfig(), id="nothing"),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5), id="v4-null"
        ),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            LLAMA3_ROPE,
            id="v4-llama3",
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            LLAMA3_ROPE,
            id="v5-llama3",
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            RopeConfig(theta=5e5),
            id="v5-default",
        ),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(rope_type="linear", factor=2),
            id="legacy-key-type",
        ),
        pytest.param(
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024},
            },
            RopeConfig(rope_type="yarn", factor=4.0, original_max_positions=1024),
            id="yarn-factor-from-context",
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            RopeConfig(rope_type="yarn", factor=4.0, original_max_positions=2048),
            id="yarn-original-from-context",
        ),
        pytest.param(
            {
                "original_max_position_embeddings": 512,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            RopeConfig(rope_type="yarn", factor=4.0, original_max_positions=512),
            id="original-beside-rope",
        ),
    ],
)
def test_rope_is_read_in_every_spelling(fields: dict[str, Any], rope: RopeConfig) -> None:
    assert LlamaConfig.from_hf({**BASE, **fields}).rope == rope


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"model_type": "llama", "architectures": None}, id="model-type"),
        pytest.param(
            {"model_type": "other", "architectures": ["LlamaForCausalLM"]}, id="architecture"
        ),
    ],
)
def test_a_llama_is_known_by_type_or_architecture(fields: dict[str, Any]) -> None:
    assert LlamaConfig.from_hf({**BASE, **fields}).num_layers == 2


def test_head_dim_need_not_follow_from_the_width() -> None:
    assert LlamaConfig.from_hf({**BASE, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"model_type": "mistral"}, "'mistral'.*only 'llama'", id="other-model"),
        pytest.param({"model_type": None}, "model_type is None", id="no-model-type"),
        pytest.param({"hidden_act": "gelu"}, "'gelu': only silu or swish", id="activation"),
        pytest.param(
            {"quantization_config": {"quant_method": "gptq"}}, "quantised \\('gptq'", id="quantised"
        ),
        pytest.param({"hidden_size": None}, "hidden_size is missing", id="missing-field"),
        pytest.param({"vocab_size": "100"}, "vocab_size is '100'", id="text-for-number"),
        pytest.param({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5", id="not-whole"),
        pytest.param({"rms_norm_eps": True}, "rms_norm_eps is True", id="bool-for-number"),
        pytest.param({"mlp_bias": 1}, "mlp_bias is 1", id="number-for-bool"),
        pytest.param({"num_hidden_layers": 0}, "num_layers is 0", id="no-layers"),
        pytest.param({"num_attention_heads": 5}, "does not split into 5 heads", id="width"),
        pytest.param({"num_key_value_heads": 3}, "must divide num_heads", id="kv-heads"),
        pytest.param({"head_dim": 17}, "must be even", id="odd-head-dim"),
        pytest.param({"rope_scaling": {"type": "dynamic"}}, "each request", id="dynamic-rope"),
        pytest.param({"rope_scaling": {"rope_type": "su"}}, "unknown rope type 'su'", id="rope"),
        pytest.param({"rope_scaling": {"type": "linear"}}, "needs factor", id="no-factor"),
        pytest.param(
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs low_freq_factor, high_freq_factor",
            id="llama3-factors",
        ),
        pytest.param({"rope_scaling": "yarn"}, "expected an object", id="rope-is-text"),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'", id="rope-number"
        ),
        pytest.param({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5", id="partial"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LlamaConfig.from_hf({**BASE, **fields})


def test_divisors_must_fit_the_head() -> None:
    with pytest.raises(CheckpointError, match="3 RoPE frequency divisors for 8 pairs"):
        LlamaConfig(
            vocab_size=8,
            hidden_size=32,
            intermediate_size=8,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            rope=RopeConfig(divisors=(1.0, 1.0, 1.0)),
        )


def test_spec_carries_every_shape() -> None:
    config = LlamaConfig.from_hf({**BASE, "num_key_value_heads": 2})
    spec = config.spec(dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
