"""The three pieces of a Llama forward that ``torch.compile`` gets, split at attention.

Shape letters: T bucket (padded) tokens, S positions of the RoPE table, V vocabulary, D model dim, F MLP intermediate,
Y = N * H query heads, X = (N + 2K) * H all heads, A = N + K heads that RoPE rotates, H head dim.

All layers share the compiled pieces, so weights are arguments.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bcg_llama.ops import add_rms_norm, rms_norm, rotate_, silu_mul, with_own_code


class Constants(NamedTuple):
    """Hold what all layers share besides rows: RoPE tables ``[S, H / 2]`` and the numbers of a Llama."""

    cos_SF: Tensor
    sin_SF: Tensor
    head_dim: int
    rotated_heads: int
    eps: float


class Rows(NamedTuple):
    """Hold what a forward over T tokens reads and writes at fixed addresses."""

    input_ids_T: Tensor
    positions_T: Tensor
    qkv_TX: Tensor
    out_TX: Tensor


class Opening(NamedTuple):
    """Hold the weights of a layer up to its attention."""

    norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor | None


class Closing(NamedTuple):
    """Hold the weights of a layer behind its attention."""

    o_DY: Tensor
    o_bias_D: Tensor | None
    norm_D: Tensor
    gate_up_2FD: Tensor
    gate_up_bias_2F: Tensor | None
    down_DF: Tensor
    down_bias_D: Tensor | None


def head(embedding_VD: Tensor, rows: Rows, opening: Opening, constants: Constants) -> Tensor:
    """Embed, and leave rotated q, k and v of the first layer in ``rows``; returns the residual stream ``[T, D]``."""
    residual_TD = embedding_VD.index_select(0, rows.input_ids_T)
    _open(rms_norm(residual_TD, opening.norm_D, constants.eps), rows, opening, constants)
    return residual_TD


def middle(
    residual_TD: Tensor, rows: Rows, closing: Closing, opening: Opening, constants: Constants
) -> Tensor:
    """Finish a layer, and leave q, k and v of the next in ``rows``; returns the residual stream ``[T, D]``."""
    residual_TD, x_TD = _close(residual_TD, rows, closing, opening.norm_D, constants.eps)
    _open(x_TD, rows, opening, constants)
    return residual_TD


def tail(
    residual_TD: Tensor, rows: Rows, closing: Closing, norm_D: Tensor, constants: Constants
) -> Tensor:
    """Finish the last layer; returns normalised hidden states ``[T, D]``."""
    return _close(residual_TD, rows, closing, norm_D, constants.eps)[1]


def _open(x_TD: Tensor, rows: Rows, weights: Opening, constants: Constants) -> None:
    qkv_TX = F.linear(x_TD, weights.qkv_XD, weights.qkv_bias_X)
    heads_TAH = qkv_TX.unflatten(-1, (-1, constants.head_dim))
    cos_TF = constants.cos_SF.index_select(0, rows.positions_T)
    sin_TF = constants.sin_SF.index_select(0, rows.positions_T)
    rotate_(heads_TAH[:, : constants.rotated_heads], cos_TF, sin_TF)
    rows.qkv_TX.copy_(qkv_TX)


def _close(
    residual_TD: Tensor, rows: Rows, weights: Closing, next_norm_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x_TD = F.linear(rows.out_TX, weights.o_DY, weights.o_bias_D)
    residual_TD, x_TD = add_rms_norm(residual_TD, x_TD, weights.norm_D, eps)
    x_TF = silu_mul(F.linear(x_TD, weights.gate_up_2FD, weights.gate_up_bias_2F))
    x_TD = F.linear(x_TF, weights.down_DF, weights.down_bias_D)
    return add_rms_norm(residual_TD, x_TD, next_norm_D, eps)


class CompiledPieces(NamedTuple):
    """Hold the functions of the same names, compiled."""

    head: Callable[..., Tensor]
    middle: Callable[..., Tensor]
    tail: Callable[..., Tensor]

    @classmethod
    def of(cls, mode: str | None) -> "CompiledPieces":
        """Compile, at the first call of each piece, in this mode of ``torch.compile``."""
        return cls(
            head=_compile(head, mode), middle=_compile(middle, mode), tail=_compile(tail, mode)
        )


def _compile(function: Callable[..., Tensor], mode: str | None) -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(
        with_own_code(function), fullgraph=True, mode=mode
    )
    return compiled
