"""Boundary buffers, workspace and forward context: aliasing, padding, and what a backend may return.

Shape letters: T bucket (padded) tokens, R real tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    BackendContractError,
    BoundaryBuffers,
    CaptureError,
    ForwardContext,
    PagedKVCache,
    Phase,
    PrefillBatch,
    PrefillModel,
    Workspace,
)
from bcg_core.context import attention

MakeBatch = Callable[..., PrefillBatch]


@pytest.fixture
def workspace(toy_model: Callable[[], Any]) -> Workspace:
    """Return a workspace of 8 tokens for 4 query and 2 KV heads of 8 elements."""
    return Workspace(toy_model().spec, 8)


@pytest.fixture
def buffers(workspace: Workspace) -> BoundaryBuffers:
    return workspace.boundary


@pytest.mark.parametrize("name", ["io", "slot_mapping_T"])
def test_a_context_that_was_not_begun_says_so(kv_cache: PagedKVCache, name: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"no {name} yet: begin\(\) a forward first, or let Pre"
    ):
        getattr(ForwardContext(kv_cache), name)


def test_a_model_that_is_captured_with_a_context_that_was_not_begun_says_so(
    kv_cache: PagedKVCache, toy_model: Callable[[], Any], capture: Callable[..., Any]
) -> None:
    ids_T = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(CaptureError, match="let PrefillRunner do it"):
        capture(toy_model().forward, ids_T, ids_T, ForwardContext(kv_cache))


def test_a_context_has_no_other_attributes(kv_cache: PagedKVCache) -> None:
    with pytest.raises(AttributeError, match="'ForwardContext' object has no attribute 'ios'"):
        _ = ForwardContext(kv_cache).ios


def test_the_toy_model_is_a_prefill_model(toy_model: Callable[[], Any]) -> None:
    assert isinstance(toy_model(), PrefillModel)


# Boundary buffers


def test_boundary_buffers_start_as_zeros(buffers: BoundaryBuffers) -> None:
    assert (buffers.qkv_MX.shape, buffers.out_MX.shape) == ((8, 64), (8, 32))
    assert buffers.qkv_MX.count_nonzero() == buffers.out_MX.count_nonzero() == 0


def test_rows_are_views(buffers: BoundaryBuffers) -> None:
    rows = buffers.rows(2, 5)
    assert rows.qkv_TX.data_ptr() == buffers.qkv_MX[2].data_ptr()
    assert rows.out_TX.data_ptr() == buffers.out_MX[2].data_ptr()
    assert rows.qkv_TX.shape == (3, 64)


HEADS: dict[str, tuple[slice, tuple[int, ...]]] = {
    "heads_TAH": (slice(0, 64), (3, 8, 8)),
    "q_TNH": (slice(0, 32), (3, 4, 8)),
    "k_TKH": (slice(32, 48), (3, 2, 8)),
    "v_TKH": (slice(48, 64), (3, 2, 8)),
    "qk_TAH": (slice(0, 48), (3, 6, 8)),
}


@pytest.mark.parametrize(("name", "where"), list(HEADS.items()), ids=HEADS)
def test_head_views_are_the_columns_of_the_fused_row(
    buffers: BoundaryBuffers, name: str, where: tuple[slice, tuple[int, ...]]
) -> None:
    columns, shape = where
    rows = buffers.rows(1, 4)
    rows.qkv_TX.copy_(torch.arange(3 * 64.0).view(3, 64))
    view = getattr(rows, name)
    assert view.shape == shape
    assert view.stride(-1) == 1
    assert torch.equal(view.flatten(1), rows.qkv_TX[:, columns])


@pytest.mark.parametrize("name", HEADS)
def test_a_write_into_a_head_view_is_one_into_the_buffer(
    buffers: BoundaryBuffers, name: str
) -> None:
    getattr(buffers.rows(0, 8), name).fill_(3)
    columns, _ = HEADS[name]
    assert (buffers.qkv_MX[:, columns] == 3).all()
    assert (buffers.qkv_MX == 3).sum() == 8 * (columns.stop - columns.start)


def test_output_heads_are_a_contiguous_view(buffers: BoundaryBuffers) -> None:
    out_TNH = buffers.rows(1, 4).out_TNH
    assert out_TNH.shape == (3, 4, 8)
    assert out_TNH.is_contiguous()
    assert out_TNH.data_ptr() == buffers.out_MX[1].data_ptr()


def test_head_views_are_made_once(buffers: BoundaryBuffers) -> None:
    rows = buffers.rows(0, 8)
    assert rows.q_TNH is rows.q_TNH


def test_filling_reaches_every_element(buffers: BoundaryBuffers) -> None:
    buffers.fill_(float("nan"))
    assert buffers.qkv_MX.isnan().all()
    assert buffers.out_MX.isnan().all()


# Workspace


def test_static_inputs_have_one_address_for_each_size(workspace: Workspace) -> None:
    first, second = workspace.inputs(5), workspace.inputs(5)
    assert first.input_ids_T.data_ptr() == second.input_ids_T.data_ptr()
    assert first.positions_T.data_ptr() == second.positions_T.data_ptr()
    assert first.slot_mapping_T.data_ptr() == second.slot_mapping_T.data_ptr()


def test_static_inputs_do_not_overlap(workspace: Workspace) -> None:
    inputs = workspace.inputs(5)
    inputs.input_ids_T.fill_(1)
    inputs.positions_T.fill_(2)
    inputs.slot_mapping_T.fill_(3)
    assert inputs.packed.tolist() == [1] * 5 + [2] * 5 + [3] * 5


def test_loading_a_batch_fills_its_rows(workspace: Workspace, make_batch: MakeBatch) -> None:
    batch, inputs = make_batch(3, 2), workspace.inputs(8)
    workspace.load(batch, inputs)
    assert inputs.input_ids_T[:5].tolist() == batch.input_ids_R.tolist()
    assert inputs.positions_T[:5].tolist() == [0, 1, 2, 0, 1]
    assert inputs.slot_mapping_T[:5].tolist() == batch.slot_mapping_R.tolist()


@pytest.mark.parametrize("name", ["input_ids_T", "positions_T", "slot_mapping_T"])
def test_loading_a_batch_zeroes_the_padded_tail(
    workspace: Workspace, make_batch: MakeBatch, name: str
) -> None:
    inputs = workspace.inputs(8)
    inputs.packed.fill_(99)
    workspace.load(make_batch(3), inputs)
    assert getattr(inputs, name)[3:].tolist() == [0] * 5


def test_loading_a_batch_fills_no_more_than_its_size(
    workspace: Workspace, make_batch: MakeBatch
) -> None:
    workspace.inputs(8).packed.fill_(99)
    workspace.load(make_batch(3), workspace.inputs(4))
    assert workspace.inputs(8).packed[12:].tolist() == [99] * 12


# Context


@pytest.fixture
def context(kv_cache: PagedKVCache) -> ForwardContext:
    return ForwardContext(kv_cache)


def bind(
    context: ForwardContext,
    workspace: Workspace,
    batch: PrefillBatch,
    backend: AttentionBackend,
    *,
    padded: int = 8,
) -> None:
    """Begin a replay of ``padded`` tokens and give it ``batch``, with the batch as metadata."""
    inputs = workspace.inputs(padded)
    workspace.load(batch, inputs)
    context.begin(Phase.REPLAY, workspace.boundary, padded, inputs.slot_mapping_T)
    context.bind(batch, backend, batch)


def test_a_forward_begins_without_a_batch(context: ForwardContext, workspace: Workspace) -> None:
    context.begin(Phase.CAPTURE, workspace.boundary, 4, workspace.inputs(4).slot_mapping_T)
    assert context.phase is Phase.CAPTURE
    assert context.io.qkv_TX.shape[0] == 4
    assert (context.real, context.batch, context.backend, context.metadata) == (None,) * 4


def test_a_backend_bound_to_all_rows_gets_them_without_a_batch(
    kv_cache: PagedKVCache, workspace: Workspace, make_backend: Callable[..., Any]
) -> None:
    context, backend, metadata = ForwardContext(kv_cache), make_backend(), object()
    inputs = workspace.inputs(6)
    context.begin(Phase.CAPTURE, workspace.boundary, 6, inputs.slot_mapping_T)
    context.bind_all(backend, metadata)
    assert context.real is context.io
    assert (context.batch, context.backend, context.metadata) == (None, backend, metadata)
    assert context.forwards == 0


def test_a_new_forward_is_not_bound_to_what_the_last_one_was(
    kv_cache: PagedKVCache, workspace: Workspace, make_backend: Callable[..., Any]
) -> None:
    context, inputs = ForwardContext(kv_cache), workspace.inputs(6)
    context.begin(Phase.CAPTURE, workspace.boundary, 6, inputs.slot_mapping_T)
    context.bind_all(make_backend(), object())
    context.begin(Phase.WARM_UP, workspace.boundary, 6, inputs.slot_mapping_T)
    assert (context.real, context.backend, context.metadata) == (None, None, None)


def test_a_bound_forward_has_views_of_the_real_rows(
    context: ForwardContext, workspace: Workspace, make_batch: MakeBatch, make_backend: Any
) -> None:
    bind(context, workspace, make_batch(3, 2), make_backend())
    assert context.real is not None
    assert context.real.q_TNH.shape == (5, 4, 8)
    assert context.real.q_TNH.data_ptr() == context.io.q_TNH.data_ptr()
    assert context.real.out_TNH.data_ptr() == workspace.boundary.out_MX.data_ptr()


def test_binding_zeroes_the_attention_output_of_padded_rows_alone(
    context: ForwardContext, workspace: Workspace, make_batch: MakeBatch, make_backend: Any
) -> None:
    workspace.boundary.fill_(float("nan"))
    bind(context, workspace, make_batch(3), make_backend(), padded=6)
    finite = workspace.boundary.out_MX.isfinite().all(1).tolist()
    assert finite == [False] * 3 + [True] * 3 + [False] * 2
    assert workspace.boundary.out_MX[3:6].count_nonzero() == 0


def test_binding_a_full_bucket_zeroes_nothing(
    context: ForwardContext, workspace: Workspace, make_batch: MakeBatch, make_backend: Any
) -> None:
    workspace.boundary.fill_(float("nan"))
    bind(context, workspace, make_batch(8), make_backend())
    assert workspace.boundary.out_MX.isnan().all()


def test_forwards_with_a_batch_are_counted(
    context: ForwardContext, workspace: Workspace, make_batch: MakeBatch, make_backend: Any
) -> None:
    context.begin(Phase.CAPTURE, workspace.boundary, 4, workspace.inputs(4).slot_mapping_T)
    assert context.forwards == 0
    bind(context, workspace, make_batch(3), make_backend())
    bind(context, workspace, make_batch(3), make_backend())
    assert context.forwards == 2


def test_attending_without_a_batch_calls_no_backend(
    context: ForwardContext, workspace: Workspace
) -> None:
    context.begin(Phase.WARM_UP, workspace.boundary, 4, workspace.inputs(4).slot_mapping_T)
    workspace.boundary.out_MX.fill_(5)
    context.attend(0)
    assert (workspace.boundary.out_MX == 5).all()


def test_attending_writes_keys_and_values_of_every_row_first(
    context: ForwardContext,
    workspace: Workspace,
    make_batch: MakeBatch,
    make_backend: Any,
    kv_cache: PagedKVCache,
) -> None:
    batch, backend = make_batch(3), make_backend()
    bind(context, workspace, batch, backend)
    context.io.k_TKH.fill_(2)
    context.io.v_TKH.fill_(3)
    at_forward: list[Any] = []
    slots = batch.slot_mapping_R
    backend.before_forward = lambda layer: at_forward.append(
        [side[slots].unique().tolist() for side in kv_cache.flat(layer)]
    )
    context.attend(1)
    assert at_forward == [[[2], [3]]]
    assert kv_cache.flat(1)[0][0].unique().tolist() == [2]
    assert kv_cache.storage_L2PSKH[0].count_nonzero() == 0


# What a backend returns


class Returning:
    """Stand for a backend whose forward returns ``make(q, out)``."""

    name = "returning"

    def __init__(self, supports_out: bool, make: Callable[[Tensor, Tensor | None], Any]) -> None:
        self.supports_out = supports_out
        self.make = make
        self.offered: list[Tensor | None] = []

    def install(self, backend: Any) -> Any:
        backend.capabilities = replace(backend.capabilities, supports_out=self.supports_out)
        backend.forward = self._forward
        return backend

    def _forward(self, q_RNH: Tensor, *rest: Any) -> Any:
        self.offered.append(rest[-1])
        return self.make(q_RNH, rest[-1])


def attend_with(
    context: ForwardContext,
    workspace: Workspace,
    batch: PrefillBatch,
    backend: AttentionBackend,
) -> Tensor:
    """Run one attention break; return the R rows of the output buffer, as [R, N, H]."""
    bind(context, workspace, batch, backend)
    attention(context, 0)
    return workspace.boundary.out_MX[: batch.num_tokens].view(-1, 4, 8)


RESULTS: dict[str, tuple[bool, Callable[[Tensor, Any], Tensor], int]] = {
    "out_itself": (True, lambda q, out: out.fill_(7), 0),
    "another_object_at_the_address_of_out": (True, lambda q, out: out.fill_(7).view(-1, 4, 8), 0),
    "a_new_tensor": (False, lambda q, out: torch.full(q.shape, 7.0), 1),
    "a_new_tensor_although_out_is_supported": (True, lambda q, out: torch.full(q.shape, 7.0), 1),
    "a_strided_tensor": (
        False,
        lambda q, out: torch.full((8, 4, q.shape[0]), 7.0).permute(2, 1, 0),
        1,
    ),
    "an_expanded_tensor": (False, lambda q, out: torch.tensor(7.0).expand(q.shape), 1),
}


@pytest.mark.parametrize(("supports_out", "make", "copies"), RESULTS.values(), ids=RESULTS)
def test_a_result_ends_up_in_the_output_rows_and_copies_are_counted(
    context: ForwardContext,
    workspace: Workspace,
    make_batch: MakeBatch,
    make_backend: Any,
    supports_out: bool,
    make: Callable[[Tensor, Any], Tensor],
    copies: int,
) -> None:
    backend = Returning(supports_out, make).install(make_backend())
    assert (attend_with(context, workspace, make_batch(3), backend) == 7).all()
    assert context.output_copies == copies


@pytest.mark.parametrize(("supports_out", "make", "copies"), RESULTS.values(), ids=RESULTS)
def test_a_result_leaves_padded_rows_zero(
    context: ForwardContext,
    workspace: Workspace,
    make_batch: MakeBatch,
    make_backend: Any,
    supports_out: bool,
    make: Callable[[Tensor, Any], Tensor],
    copies: int,
) -> None:
    workspace.boundary.fill_(float("nan"))
    backend = Returning(supports_out, make).install(make_backend())
    attend_with(context, workspace, make_batch(3), backend)
    assert workspace.boundary.out_MX[3:].count_nonzero() == 0


def test_a_view_of_out_at_other_strides_is_put_in_order(
    context: ForwardContext, workspace: Workspace, make_batch: MakeBatch, make_backend: Any
) -> None:
    # The same address and shape, heads and elements swapped: 4 heads of 8 written as if 8 of 4.
    values = torch.arange(3 * 32.0).view(3, 4, 8)

    def write_transposed(q: Tensor, out: Tensor) -> Tensor:
        swapped = out.view(3, 8, 4).transpose(1, 2)
        return swapped.copy_(values)

    backend = Returning(True, write_transposed).install(make_backend())
    assert torch.equal(attend_with(context, workspace, make_batch(3), backend), values)
    assert context.output_copies == 1


@pytest.mark.parametrize("supports_out", [True, False])
def test_out_is_offered_exactly_to_backends_that_support_it(
    context: ForwardContext,
    workspace: Workspace,
    make_batch: MakeBatch,
    make_backend: Any,
    supports_out: bool,
) -> None:
    returning = Returning(supports_out, lambda q, out: torch.zeros(q.shape))
    attend_with(context, workspace, make_batch(3), returning.install(make_backend()))
    assert (returning.offered[0] is not None) == supports_out


WRONG_RESULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "padded_rows": (lambda q: torch.zeros(8, 4, 8), r"\(8, 4, 8\) .*expected \(3, 4, 8\)"),
    "flat_heads": (lambda q: torch.zeros(3, 32), r"\(3, 32\) .*expected \(3, 4, 8\)"),
    "a_broadcast_row": (lambda q: torch.zeros(1, 4, 8), r"\(1, 4, 8\)"),
    "heads_first": (lambda q: torch.zeros(4, 3, 8), r"\(4, 3, 8\)"),
    "dtype": (lambda q: torch.zeros(3, 4, 8).bfloat16(), "torch.bfloat16 .*torch.float32"),
    "device": (lambda q: torch.zeros(3, 4, 8, device="meta"), "on meta, expected .* on cpu"),
    "nothing": (lambda q: None, "NoneType, expected a tensor"),
    "a_pair": (lambda q: (torch.zeros(3, 4, 8), None), "tuple, expected a tensor"),
}


@pytest.mark.parametrize(("make", "message"), WRONG_RESULTS.values(), ids=WRONG_RESULTS)
@pytest.mark.parametrize("supports_out", [True, False], ids=["out", "no_out"])
def test_a_wrong_result_breaks_the_contract_and_names_backend_and_layer(
    context: ForwardContext,
    workspace: Workspace,
    make_batch: MakeBatch,
    make_backend: Any,
    make: Callable[[Tensor], Any],
    message: str,
    supports_out: bool,
) -> None:
    backend = Returning(supports_out, lambda q, out: make(q)).install(make_backend())
    with pytest.raises(
        BackendContractError, match=f"'toy': layer 0: forward returned .*{message}"
    ) as caught:
        attend_with(context, workspace, make_batch(3), backend)
    assert caught.value.backend == "toy"
