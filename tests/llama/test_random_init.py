"""Random models: repeatable, of size 1 at every depth, and noisy where a mistake could hide."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_llama import PRESETS, LlamaModel, random_llama


def flat(model: LlamaModel) -> Tensor:
    return torch.cat([tensor.flatten() for _, tensor in model.named_tensors()])


def test_a_seed_gives_the_same_weights() -> None:
    assert torch.equal(flat(random_llama(PRESETS["tiny"])), flat(random_llama(PRESETS["tiny"])))


def test_another_seed_gives_other_weights() -> None:
    first, second = (flat(random_llama(PRESETS["tiny"], seed=seed)) for seed in (0, 1))
    assert (first == second).float().mean() < 0.01


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    random_llama(PRESETS["tiny"])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_have_the_dtype_asked_for(dtype: torch.dtype) -> None:
    model = random_llama(PRESETS["tiny"], dtype=dtype)
    assert {tensor.dtype for _, tensor in model.named_tensors()} == {dtype}


def test_logits_are_of_size_one(ids: Tensor, logits: Any) -> None:
    assert 0.5 < logits(random_llama(PRESETS["tiny"]), ids).std() < 2


def test_no_norm_weight_is_one() -> None:
    norms = [t for name, t in random_llama(PRESETS["tiny"]).named_tensors() if "norm" in name]
    assert not any((norm == 1).all() for norm in norms)


def test_biases_are_not_zero() -> None:
    model = random_llama(PRESETS["tiny-bias"])
    biases = [tensor for name, tensor in model.named_tensors() if name.endswith("bias")]
    assert min(bias.std() for bias in biases) > 0.05
