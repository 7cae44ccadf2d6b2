"""The Llama forward, as the core captures it.

Shape letters: T bucket (padded) tokens, B requests, V vocabulary, D model dim, F rotated pairs, X fused q,
k and v heads.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bcg_core.context import ForwardContext
from bcg_core.spec import ModelSpec
from bcg_llama.ops import ElementwiseOps
from bcg_llama.rope_table import cos_sin_table
from bcg_llama.weights import LayerWeights, LlamaWeights


class LlamaModel:
    """Compute hidden states and logits of a Llama; implements ``bcg_core.model.PrefillModel``.

    Attributes:
        config: the shapes.
        weights: all weights; ``load_llama`` and ``random_llama`` make them.
        ops: the element-wise functions.
    """

    def __init__(self, weights: LlamaWeights, *, fuse: bool | None = None) -> None:
        """Take ``weights`` without copying them.

        ``fuse`` compiles the element-wise functions with ``torch.compile`` at the first forward; None does so on CUDA
        only. A fused model on the CPU runs, but the CPU engine cannot capture it: torch.compile refuses to work below
        a recorder.
        """
        device = weights.norm_D.device
        self.config = config = weights.config
        self.weights = weights
        self.ops = (
            ElementwiseOps.compiled()
            if (device.type == "cuda" if fuse is None else fuse)
            else ElementwiseOps.plain()
        )
        self._spec = config.spec(dtype=weights.norm_D.dtype, device=device)
        self._cos_SF, self._sin_SF = cos_sin_table(
            config.rope, head_dim=config.head_dim, max_positions=config.max_positions, device=device
        )

    @property
    def spec(self) -> ModelSpec:
        """Return the shapes of this model."""
        return self._spec

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight under its name in a Hugging Face checkpoint; views, not copies."""
        return self.weights.named_tensors()

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the normalised hidden states ``[T, D]``; see ``PrefillModel.forward``.

        Capturable: no host reads, and the same operations for every T. Positions must lie in
        ``[0, spec.max_positions)``.
        """
        weights, ops, eps = self.weights, self.ops, self.config.rms_norm_eps
        cos_TF = self._cos_SF.index_select(0, positions_T)
        sin_TF = self._sin_SF.index_select(0, positions_T)

        residual_TD = weights.embedding_VD.index_select(0, input_ids_T)
        x_TD = ops.rms_norm(residual_TD, weights.layers[0].attention_norm_D, eps)
        next_norms = [layer.attention_norm_D for layer in weights.layers[1:]] + [weights.norm_D]
        for index, (layer, next_norm_D) in enumerate(zip(weights.layers, next_norms, strict=True)):
            x_TD = self._attention(index, layer, x_TD, cos_TF, sin_TF, ctx)
            residual_TD, x_TD = ops.add_rms_norm(residual_TD, x_TD, layer.mlp_norm_D, eps)
            x_TD = self._mlp(layer, x_TD)
            residual_TD, x_TD = ops.add_rms_norm(residual_TD, x_TD, next_norm_D, eps)
        return x_TD

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits ``[B, V]``, in the model's dtype, of normalised hidden states ``[B, D]``."""
        return F.linear(hidden_BD, self.weights.head_VD)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x_TD: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        ctx: ForwardContext,
    ) -> Tensor:
        io, w_DX = ctx.io, layer.qkv_XD.t()
        if layer.qkv_bias_X is None:
            torch.mm(x_TD, w_DX, out=io.qkv_TX)
        else:
            torch.addmm(layer.qkv_bias_X, x_TD, w_DX, out=io.qkv_TX)
        self.ops.rotate_(io.qk_TAH, cos_TF, sin_TF)
        ctx.attend(index)
        return F.linear(io.out_TX, layer.o_DY, layer.o_bias_D)

    def _mlp(self, layer: LayerWeights, x_TD: Tensor) -> Tensor:
        x_TF = self.ops.silu_mul(F.linear(x_TD, layer.gate_up_2FD, layer.gate_up_bias_2F))
        return F.linear(x_TF, layer.down_DF, layer.down_bias_D)
