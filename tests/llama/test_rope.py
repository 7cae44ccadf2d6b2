"""Inverse frequencies and tables against transformers, and the rotation itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bcg_core.errors import CheckpointError
from bcg_llama import PRESETS, RopeConfig
from bcg_llama.ops import rotate_
from bcg_llama.rope_table import cos_sin_table, inverse_frequencies

YARN = RopeConfig(rope_type="yarn", factor=4.0, original_max_positions=512)
LLAMA3 = RopeConfig(rope_type="llama3", theta=5e5, factor=8.0, original_max_positions=512)
ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig(rope_type="linear", factor=2.5),
    "llama3": LLAMA3,
    "llama-3.1": PRESETS["llama-8b"].rope,
    "llama-3.2": PRESETS["llama-1b"].rope,
    "yarn": YARN,
    "yarn-mscale": replace(YARN, mscale=1.2, mscale_all_dim=0.8),
    "yarn-attention-factor": replace(YARN, attention_factor=1.5),
    "yarn-untruncated": replace(YARN, truncate=False, beta_fast=20.0, beta_slow=2.0),
    "yarn-shrunk": replace(YARN, factor=0.5),
    "yarn-narrow": replace(YARN, beta_fast=1.0, beta_slow=1.0, truncate=False),
}


def reference(rope: RopeConfig, hf_dict: Any) -> Any:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(**hf_dict(replace(PRESETS["tiny"], rope=rope)))
    return llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_inverse_frequencies_are_those_of_transformers(rope: RopeConfig, hf_dict: Any) -> None:
    expected = reference(rope, hf_dict).inv_freq
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_table_is_that_of_transformers(rope: RopeConfig, hf_dict: Any) -> None:
    cpu = torch.device("cpu")
    table = torch.cat(cos_sin_table(rope, head_dim=64, max_positions=2048, device=cpu), -1)
    cos, sin = reference(rope, hf_dict)(torch.zeros(1), torch.arange(2048)[None])
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), -1)
    # An angle up to 2048 is known to half a float32 step, 2 ** -14.
    torch.testing.assert_close(table, expected, rtol=0, atol=2**-12)


@pytest.mark.parametrize("preset", ["llama-1b", "llama-8b"])
def test_the_end_of_a_long_context_is_that_of_transformers(preset: str, hf_dict: Any) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = PRESETS[preset]
    assert config.max_positions == 131072
    cos_SF, sin_SF = cos_sin_table(
        config.rope,
        head_dim=config.head_dim,
        max_positions=config.max_positions,
        device=torch.device("cpu"),
    )
    rotary = llama.LlamaRotaryEmbedding(llama.LlamaConfig(**hf_dict(config)))
    cos, sin = rotary(torch.zeros(1), torch.arange(131008, 131072)[None])
    half = config.head_dim // 2
    # An angle up to 131072 is known to half a float32 step, 2 ** -8.
    torch.testing.assert_close(cos_SF[-64:], cos[0, :, :half], rtol=0, atol=2**-6)
    torch.testing.assert_close(sin_SF[-64:], sin[0, :, :half], rtol=0, atol=2**-6)


def test_divisors_divide_the_frequencies() -> None:
    divisors = tuple(float(i + 1) for i in range(32))
    found = inverse_frequencies(RopeConfig(divisors=divisors), 64)
    expected = inverse_frequencies(RopeConfig(), 64) / torch.arange(1, 33)
    torch.testing.assert_close(found, expected)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    angles = torch.tensor([[0.3, 1.0], [2.0, -0.5]])
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]], [[0.0, 2.0, 0.0, 0.0]]])
    rotate_(x, angles.cos(), angles.sin())
    expected = torch.stack(
        (
            torch.tensor([0.3, 1.0]).cos() * torch.tensor([1.0, 0.0])
            - torch.tensor([0.3, 1.0]).sin() * torch.tensor([0.0, 1.0]),
            2 * torch.tensor([-0.5]).cos() * torch.tensor([0.0, 1.0]),
        )
    )
    torch.testing.assert_close(x[:, 0, :2], expected)


def test_rotation_keeps_lengths() -> None:
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    before = x.norm(dim=-1)
    angles = torch.arange(20.0).view(5, 4)
    rotate_(x, angles.cos(), angles.sin())
    torch.testing.assert_close(x.norm(dim=-1), before)


def test_rotation_leaves_what_lies_between_strided_rows() -> None:
    rows = torch.ones(6, 5, 4)
    rotate_(rows[:, :3], torch.zeros(6, 2), torch.ones(6, 2))
    assert torch.equal(rows[:, 3:], torch.ones(6, 2, 4))


def test_rotation_of_strided_rows_equals_that_of_contiguous_ones() -> None:
    rows = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = rows[:, :3].clone()
    rotate_(expected, torch.full((6, 2), 0.6), torch.full((6, 2), 0.8))
    rotate_(rows[:, :3], torch.full((6, 2), 0.6), torch.full((6, 2), 0.8))
    assert torch.equal(rows[:, :3], expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"rope_type": "dynamic"}, "length of each request", id="dynamic"),
        pytest.param({"rope_type": "longrope"}, "unknown rope type 'longrope'", id="unknown"),
        pytest.param({"theta": 0.0}, "must be positive", id="theta"),
        pytest.param({"rope_type": "linear", "factor": -1.0}, "must be positive", id="factor"),
        pytest.param({"rope_type": "yarn"}, "original_max_positions", id="no-original"),
        pytest.param(
            {"rope_type": "llama3", "original_max_positions": 512, "low_freq_factor": 4.0},
            "above",
            id="llama3-factors",
        ),
    ],
)
def test_impossible_rope_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        RopeConfig(**fields)
