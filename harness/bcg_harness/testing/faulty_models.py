"""Models with one fault each, to prove that the checks find it.

Shape letters: T bucket (padded) tokens, B requests, D model dim, N query heads, K KV heads, H head dim.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bcg_core import ForwardContext, ModelSpec, PrefillModel, break_graph, eager_on_graph
from bcg_core.context import attention


class _Wrapper:
    """Run another model with a context that attends in another way."""

    def __init__(self, inner: PrefillModel) -> None:
        self.inner = inner

    @property
    def spec(self) -> ModelSpec:
        """Return the shapes of the model."""
        return self.inner.spec

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Run the model, attending through ``attend``."""
        context = cast("ForwardContext", _Context(self, ctx))
        return self.inner.forward(input_ids_T, positions_T, context)

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        """Delegate."""
        return self.inner.compute_logits(hidden_BD)

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Attend as the context does."""
        ctx.attend(layer)


class _Context:
    def __init__(self, wrapper: _Wrapper, ctx: ForwardContext) -> None:
        self._wrapper = wrapper
        self._ctx = ctx

    def attend(self, layer: int) -> None:
        self._wrapper.attend(self._ctx, layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class SkipsBreak(_Wrapper):
    """Leave attention out in one layer: what the layer before attended to goes in again."""

    def __init__(self, inner: PrefillModel, layer: int = 1) -> None:
        super().__init__(inner)
        self.layer = layer

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Attend, but not in that layer."""
        if layer != self.layer:
            ctx.attend(layer)


class AttendsInSegment(_Wrapper):
    """Attend inside the segment, over all rows as one request: no break, so no request boundaries."""

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Write the cache, then attend as capture lets it."""
        io = ctx.io
        ctx.kv_cache.write(layer, io.k_TKH, io.v_TKH, ctx.slot_mapping_T)
        q, k, v = (heads.transpose(0, 1)[None] for heads in (io.q_TNH, io.k_TKH, io.v_TKH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        io.out_TNH.copy_(out[0].transpose(0, 1))


class BreaksTwice(_Wrapper):
    """Break once more in every layer, with nothing to do there."""

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Break, and attend."""
        break_graph()
        ctx.attend(layer)


class RunsInOneBreak(_Wrapper):
    """Run the whole forward in a single break: right, and as slow as without any graph."""

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Leave nothing to segments."""
        return self._forward(input_ids_T, positions_T, ctx)

    @eager_on_graph
    def _forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        return super().forward(input_ids_T, positions_T, ctx)


class AttendsTwice(_Wrapper):
    """Attend twice in every break: the same result, at twice the price."""

    @eager_on_graph
    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Attend, and attend."""
        ctx.attend(layer)
        ctx.attend(layer)


class CachesOtherKeys(_Wrapper):
    """Write keys to the cache that are not those which attention is given."""

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Write, and attend as the context does."""
        ctx.kv_cache.write(layer, ctx.io.k_TKH * 1.01, ctx.io.v_TKH, ctx.slot_mapping_T)
        attention(ctx, layer)


class CachesOtherValues(_Wrapper):
    """Write values to the cache that are not those which attention is given."""

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Write, and attend as the context does."""
        ctx.kv_cache.write(layer, ctx.io.k_TKH, ctx.io.v_TKH * 1.01, ctx.slot_mapping_T)
        attention(ctx, layer)


class DividesBySlot(_Wrapper):
    """Divide by what is 1 in real rows, and 0 in padded ones."""

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Leave padded rows infinite."""
        hidden_TD = super().forward(input_ids_T, positions_T, ctx)
        return hidden_TD / ctx.slot_mapping_T[:, None].clamp(max=1)


class KeepsPythonState(_Wrapper):
    """Shift positions by what an earlier call left in a Python attribute, which a replay does not run again."""

    def __init__(self, inner: PrefillModel) -> None:
        super().__init__(inner)
        self.calls = 0

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Use other positions every other time."""
        self.calls += 1
        return super().forward(input_ids_T, positions_T.clamp(max=self.calls % 2 * 2**30), ctx)


class LeavesSideChannel(_Wrapper):
    """Leave the attention output in an attribute, from where the next segment takes it."""

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Attend in a break, and read what it left: right in eager, stale in a replay."""
        self._attend(ctx, layer)
        ctx.io.out_TX.copy_(self.left)

    @eager_on_graph
    def _attend(self, ctx: ForwardContext, layer: int) -> None:
        ctx.attend(layer)
        self.left = ctx.io.out_TX.clone()


class FreezesPythonNumber(_Wrapper):
    """Hand the number of requests to a break as a Python number, which is frozen at capture."""

    def attend(self, ctx: ForwardContext, layer: int) -> None:
        """Scale by the number of requests."""
        self._attend(ctx, layer, 1 if ctx.batch is None else ctx.batch.num_requests)

    @eager_on_graph
    def _attend(self, ctx: ForwardContext, layer: int, requests: int) -> None:
        ctx.attend(layer)
        ctx.io.out_TX.mul_(requests)


class KeepsOneTable(_Wrapper):
    """Build a table when its shape changes, and keep that one: a forward may find what a capture has only recorded."""

    def __init__(self, inner: PrefillModel) -> None:
        super().__init__(inner)
        self.table_T = torch.ones(0)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Multiply by ones that were made for this shape, whenever that was."""
        if self.table_T.shape != positions_T.shape:
            self.table_T = torch.ones(positions_T.shape, device=positions_T.device)
        return super().forward(input_ids_T, positions_T, ctx) * self.table_T[:, None]
