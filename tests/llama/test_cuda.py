"""On a GPU: fused functions are the default, agree with the CPU, and can be captured."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_llama import PRESETS, ElementwiseOps, LlamaModel, LlamaWeights, random_llama

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch 2.13 warns about itself when torch.compile's default backend is first imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


def copied(model: LlamaModel, *, fuse: bool | None = None) -> LlamaModel:
    """Copy a model to the GPU."""
    weights = LlamaWeights.empty(
        model.config, dtype=model.spec.dtype, device=torch.device("cuda", 0)
    )
    pairs = zip(weights.named_tensors(), model.named_tensors(), strict=True)
    for (_, target), (_, source) in pairs:
        target.copy_(source)
    return LlamaModel(weights, fuse=fuse)


def test_functions_are_compiled_by_default() -> None:
    assert random_llama(PRESETS["tiny"], device="cuda").ops != ElementwiseOps.plain()


@pytest.mark.parametrize("preset", sorted(name for name in PRESETS if name.startswith("tiny")))
def test_fused_logits_are_those_of_the_cpu(
    preset: str, ids: Tensor, logits: Any, error_of: Any
) -> None:
    model = random_llama(PRESETS[preset])
    assert error_of(logits(copied(model), ids.cuda()).cpu(), logits(model, ids)) <= 1e-4


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
def test_replayed_rotation_and_norms_equal_a_call(fuse: bool) -> None:
    ops = ElementwiseOps.compiled() if fuse else ElementwiseOps.plain()
    rows = torch.randn(64, 5, 64, device="cuda", dtype=torch.bfloat16)
    x, y = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(128, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, 64, 32, device="cuda")

    def work() -> tuple[Tensor, ...]:
        ops.rotate_(rows[:, :3], cos, sin)
        return ops.rms_norm(x, weight, 1e-5), *ops.add_rms_norm(x, y, weight, 1e-5), ops.silu_mul(x)

    before = rows.clone()
    expected = (*work(), rows.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    rows.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close((*outputs, rows), expected, rtol=0, atol=0)
