"""Our logits against those of transformers' LlamaForCausalLM with the same weights, in float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_llama import PRESETS, LlamaConfig, LlamaModel, LlamaWeights, RopeConfig, random_llama
from bcg_llama.ops import ElementwiseOps, add_rms_norm, silu_mul

TINY = sorted(name for name in PRESETS if name.startswith("tiny"))

YARN = RopeConfig(rope_type="yarn", factor=8.0, original_max_positions=256)
LLAMA3 = PRESETS["tiny-llama3"].rope
ROPES = {
    "default-theta": RopeConfig(theta=500000.0),
    "linear": RopeConfig(rope_type="linear", factor=8.0),
    "llama3": LLAMA3,
    "llama3-factors": replace(LLAMA3, low_freq_factor=0.5, high_freq_factor=16.0),
    "yarn": YARN,
    "yarn-betas": replace(YARN, beta_fast=16.0, beta_slow=2.0),
    "yarn-mscale": replace(YARN, mscale=1.0, mscale_all_dim=0.5),
    "yarn-attention-factor": replace(YARN, attention_factor=0.75),
    "yarn-untruncated": replace(YARN, truncate=False),
}


@pytest.fixture(scope="module", params=TINY)
def both(
    request: pytest.FixtureRequest, ids: Tensor, logits: Any, hf_logits: Any
) -> tuple[Tensor, Tensor]:
    """Return our logits and those of transformers for one preset."""
    model = random_llama(PRESETS[request.param])
    return logits(model, ids), hf_logits(model, ids)


def test_logits_of_a_preset(both: tuple[Tensor, Tensor], error_of: Any) -> None:
    assert error_of(*both) <= 1e-4


def test_most_likely_tokens_of_a_preset(both: tuple[Tensor, Tensor]) -> None:
    ours, theirs = both
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_logits_of_a_rope(
    rope: RopeConfig, ids: Tensor, logits: Any, hf_logits: Any, error_of: Any
) -> None:
    model = random_llama(replace(PRESETS["tiny"], rope=rope))
    assert error_of(logits(model, ids), hf_logits(model, ids)) <= 1e-4


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_a_rope_differs_from_the_default(
    rope: RopeConfig, ids: Tensor, logits: Any, error_of: Any
) -> None:
    plain, model = (
        random_llama(replace(PRESETS["tiny"], rope=each)) for each in (RopeConfig(), rope)
    )
    assert error_of(logits(plain, ids), logits(model, ids)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_close_to_float32_as_transformers(
    dtype: torch.dtype, ids: Tensor, logits: Any, hf_logits: Any, error_of: Any
) -> None:
    model = random_llama(PRESETS["tiny"], dtype=dtype)
    exact_weights = LlamaWeights.empty(
        model.config, dtype=torch.float32, device=torch.device("cpu")
    )
    for (_, exact), (_, low) in zip(
        exact_weights.named_tensors(), model.named_tensors(), strict=True
    ):
        exact.copy_(low)
    exact_logits = logits(LlamaModel(exact_weights), ids)
    ours = error_of(logits(model, ids), exact_logits)
    assert ours <= 2 * error_of(hf_logits(model, ids), exact_logits) + torch.finfo(dtype).eps


def without_rope(model: LlamaModel) -> ElementwiseOps:
    return replace(model.ops, rotate_=lambda x, cos, sin: None)


def with_rope_backwards(model: LlamaModel) -> ElementwiseOps:
    return replace(model.ops, rotate_=lambda x, cos, sin: model.ops.rotate_(x, cos, -sin))


def with_gate_and_up_swapped(model: LlamaModel) -> ElementwiseOps:
    return replace(model.ops, silu_mul=lambda x: silu_mul(torch.cat(x.chunk(2, -1)[::-1], -1)))


def without_the_norm_weight(model: LlamaModel) -> ElementwiseOps:
    def faulty(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Any:
        return add_rms_norm(residual, delta, torch.ones_like(weight), eps)

    return replace(model.ops, add_rms_norm=faulty)


def without_the_residual(model: LlamaModel) -> ElementwiseOps:
    def faulty(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Any:
        return add_rms_norm(torch.zeros_like(residual), delta, weight, eps)

    return replace(model.ops, add_rms_norm=faulty)


@pytest.mark.parametrize(
    "fault",
    [
        without_rope,
        with_rope_backwards,
        with_gate_and_up_swapped,
        without_the_norm_weight,
        without_the_residual,
    ],
)
def test_a_faulty_model_is_far_off(
    fault: Callable[[LlamaModel], ElementwiseOps],
    ids: Tensor,
    logits: Any,
    hf_logits: Any,
    error_of: Any,
) -> None:
    model = random_llama(PRESETS["tiny"])
    plain = replace(model.ops)
    faulty = LlamaModel(model.weights)
    faulty.ops = fault(model)
    assert model.ops == plain
    assert error_of(logits(faulty, ids), hf_logits(model, ids)) > 1e-2


def test_reading_back_a_transformers_config_gives_the_same_shape() -> None:
    transformers = pytest.importorskip("transformers")
    raw = transformers.LlamaConfig(num_attention_heads=8, hidden_size=512).to_dict()
    config = LlamaConfig.from_hf(raw)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 8, 64)
