"""A Llama that runs in compiled pieces.

Shape letters: T bucket (padded) tokens, B requests, V vocabulary, D model dim.

q, k, v and the attention output lie in the runner's boundary buffers. They and the weights keep their addresses, and
are marked so that CUDA graphs read and write them in place; only the residual stream and the final hidden states are
made by the pieces.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from bcg_core import ForwardContext, ModelSpec, Phase
from bcg_harness.bench.llama_pieces import Closing, CompiledPieces, Constants, Opening, Rows
from bcg_llama import LlamaModel
from bcg_llama.rope_table import cos_sin_table


class CompiledLlama:
    """Compute what a ``LlamaModel`` computes with compiled pieces; implements ``bcg_core.model.PrefillModel``.

    The number of tokens stays symbolic, so that a piece is compiled once for all of them (and once for a single token).

    Args:
        model: its weights are shared.
        graphed: token counts whose pieces torch records as CUDA graphs, one for each piece, layer and count. They come
            with the same buffers at every call. Without a meaning on a CPU, which has no graphs.
    """

    def __init__(self, model: LlamaModel, graphed: Iterable[int]) -> None:
        self.inner = model
        self._graphed = frozenset(graphed) if model.spec.device.type == "cuda" else frozenset()
        self._rows: dict[int, Rows] = {}
        self._plain_pieces, self._graphed_pieces = (
            CompiledPieces.of(mode) for mode in (None, "reduce-overhead")
        )
        config, weights = model.config, model.weights
        cos_SF, sin_SF = cos_sin_table(
            config.rope,
            head_dim=config.head_dim,
            max_positions=config.max_positions,
            device=model.spec.device,
        )
        self._constants = Constants(
            cos_SF=_fixed(cos_SF),
            sin_SF=_fixed(sin_SF),
            head_dim=config.head_dim,
            rotated_heads=config.num_heads + config.num_kv_heads,
            eps=config.rms_norm_eps,
        )
        self._embedding_VD = _fixed(weights.embedding_VD)
        self._norm_D = _fixed(weights.norm_D)
        self._openings = [
            Opening(
                norm_D=_fixed(layer.attention_norm_D),
                qkv_XD=_fixed(layer.qkv_XD),
                qkv_bias_X=_fixed_or_none(layer.qkv_bias_X),
            )
            for layer in weights.layers
        ]
        self._closings = [
            Closing(
                o_DY=_fixed(layer.o_DY),
                o_bias_D=_fixed_or_none(layer.o_bias_D),
                norm_D=_fixed(layer.mlp_norm_D),
                gate_up_2FD=_fixed(layer.gate_up_2FD),
                gate_up_bias_2F=_fixed_or_none(layer.gate_up_bias_2F),
                down_DF=_fixed(layer.down_DF),
                down_bias_D=_fixed_or_none(layer.down_bias_D),
            )
            for layer in weights.layers
        ]

    @property
    def spec(self) -> ModelSpec:
        """Return the shapes of the model."""
        return self.inner.spec

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits ``[B, V]`` of normalised hidden states ``[B, D]``, not compiled."""
        return self.inner.compute_logits(hidden_BD)

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the normalised hidden states ``[T, D]``; overwritten by the next forward of a graphed token count."""
        graphed = len(input_ids_T) in self._graphed
        pieces = self._graphed_pieces if graphed else self._plain_pieces
        rows = self._rows_of(input_ids_T, positions_T, ctx, graphed=graphed)
        # Marks matter when something is compiled, which a replay never does.
        mark = _let_vary if ctx.phase is not Phase.REPLAY else _leave
        if graphed:
            torch.compiler.cudagraph_mark_step_begin()
        residual_TD = mark(
            pieces.head(self._embedding_VD, rows, self._openings[0], self._constants)
        )
        layers = zip(self._closings, self._openings[1:], strict=False)
        for layer, (closing, opening) in enumerate(layers):
            ctx.attend(layer)
            residual_TD = mark(pieces.middle(residual_TD, rows, closing, opening, self._constants))
        ctx.attend(len(self._closings) - 1)
        return pieces.tail(residual_TD, rows, self._closings[-1], self._norm_D, self._constants)

    def _rows_of(
        self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext, *, graphed: bool
    ) -> Rows:
        """Return the rows of this forward; the very same tensors at every graphed forward over T tokens."""
        size = len(input_ids_T)
        if size in self._rows:
            return self._rows[size]
        rows = Rows(
            input_ids_T=_let_vary(input_ids_T),
            positions_T=_let_vary(positions_T),
            qkv_TX=_let_vary(ctx.io.qkv_TX),
            out_TX=_let_vary(ctx.io.out_TX),
        )
        if graphed:
            for tensor in rows:
                torch._dynamo.mark_static_address(tensor, guard=False)
            self._rows[size] = rows
        return rows


def _fixed(tensor: Tensor) -> Tensor:
    """Return an alias of ``tensor`` that CUDA graphs read in place; another address makes another graph."""
    alias = tensor.detach()
    # Guarded, each layer would be compiled anew.
    torch._dynamo.mark_static_address(alias, guard=False)
    return alias


def _fixed_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _fixed(tensor)


def _let_vary(tensor_TX: Tensor) -> Tensor:
    """Mark the number of rows as what varies; torch.compile specialises a single row in any case."""
    if tensor_TX.shape[0] > 1:
        torch._dynamo.mark_dynamic(tensor_TX, 0)
    return tensor_TX


def _leave(tensor_TX: Tensor) -> Tensor:
    return tensor_TX
