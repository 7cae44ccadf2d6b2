"""What the core relies on: the protocol, the boundary, and rows that do not depend on each other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core.model import PrefillModel
from bcg_llama import PRESETS, ElementwiseOps, LlamaModel, random_llama


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return random_llama(PRESETS["tiny"])


def test_model_is_a_prefill_model(model: LlamaModel) -> None:
    assert isinstance(model, PrefillModel)


def test_each_layer_attends_once_and_in_order(
    model: LlamaModel, ids: Tensor, make_context: Any
) -> None:
    ctx = make_context(model, 8)
    model.forward(ids[:8], torch.arange(8), ctx)
    assert ctx.backend.layers == [0, 1, 2, 3]


def test_projection_writes_every_boundary_row(
    model: LlamaModel, ids: Tensor, make_context: Any
) -> None:
    ctx = make_context(model, 8)
    ctx.io.qkv_TX.fill_(float("nan"))
    model.forward(ids[:8], torch.arange(8), ctx)
    assert ctx.io.qkv_TX.isfinite().all()


def test_values_are_not_rotated(model: LlamaModel, ids: Tensor, make_context: Any) -> None:
    values = []
    for start in (0, 100):
        ctx = make_context(model, 8)
        model.forward(ids[:8], torch.arange(start, start + 8), ctx)
        values.append(ctx.kv_cache.flat(0)[1].clone())
    assert torch.equal(*values)


def test_only_distances_matter(
    model: LlamaModel, ids: Tensor, make_context: Any, error_of: Any
) -> None:
    near = model.forward(ids[:8], torch.arange(8), make_context(model, 8))
    far = model.forward(ids[:8], torch.arange(1000, 1008), make_context(model, 8))
    assert error_of(far, near) <= 1e-4


def test_real_rows_do_not_depend_on_padded_ones(
    model: LlamaModel, ids: Tensor, make_context: Any
) -> None:
    positions = torch.arange(16)
    first = model.forward(ids[:16], positions, make_context(model, 16, real=10))
    other = torch.cat((ids[:10], ids[100:106]))
    second = model.forward(other, positions, make_context(model, 16, real=10))
    assert torch.equal(first[:10], second[:10])


def test_a_forward_changes_no_weight(model: LlamaModel, ids: Tensor, logits: Any) -> None:
    before = {name: tensor.clone() for name, tensor in model.named_tensors()}
    logits(model, ids)
    changed = [name for name, t in model.named_tensors() if not torch.equal(t, before[name])]
    assert changed == []


def test_weights_need_no_gradient(model: LlamaModel) -> None:
    assert not any(tensor.requires_grad for _, tensor in model.named_tensors())


def test_named_tensors_are_views_of_the_fused_ones(model: LlamaModel) -> None:
    names = dict(model.named_tensors())
    fused = model.weights.layers[1].qkv_XD
    query, key, value = (names[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv")
    assert query.data_ptr() == fused.data_ptr()
    assert torch.equal(torch.cat((query, key, value)), fused)


def test_tied_head_is_the_embedding() -> None:
    weights = random_llama(PRESETS["tiny-tied"]).weights
    assert weights.head_VD is weights.embedding_VD


def test_table_ends_at_max_positions(ids: Tensor, make_context: Any) -> None:
    model = random_llama(replace(PRESETS["tiny"], max_positions=8))
    with pytest.raises(IndexError):
        model.forward(ids[:2], torch.tensor([7, 8]), make_context(model, 2))


@pytest.mark.parametrize("fuse", [None, False], ids=str)
def test_functions_stay_plain_on_the_cpu(fuse: bool | None) -> None:
    model = random_llama(PRESETS["tiny"], fuse=fuse)
    assert model.ops == ElementwiseOps.plain()


def test_functions_are_compiled_when_asked_for() -> None:
    assert random_llama(PRESETS["tiny"], fuse=True).ops != ElementwiseOps.plain()
