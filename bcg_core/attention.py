"""Attention by its definition, exact and as inexact as kernels are: what every backend is judged by.

Shape letters: R new tokens of one request, S its tokens from the first on, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_PARTS = 128
"""Parts of a sum that are added up one after the other."""


def causal_attention(
    q_RNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    *,
    scale: float,
    dtype: torch.dtype,
    matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """Compute one request's causal attention ``[R, N, H]`` by its definition, every operation in ``dtype``.

    The R queries belong to the last R of the S keys: the mask is aligned bottom-right. ``matmul`` multiplies.
    """
    new, total = q_RNH.shape[0], k_SKH.shape[0]
    group = q_RNH.shape[1] // k_SKH.shape[1]
    q_NRH = q_RNH.to(dtype).transpose(0, 1)
    k_NSH, v_NSH = (
        kv.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for kv in (k_SKH, v_SKH)
    )
    logits_NRS = matmul(q_NRH, k_NSH.mT) * scale
    positions_R = torch.arange(total - new, total, device=q_RNH.device)
    future_RS = torch.arange(total, device=q_RNH.device) > positions_R[:, None]
    weights_NRS = logits_NRS.masked_fill(future_RS, float("-inf")).softmax(dim=-1)
    return matmul(weights_NRS, v_NSH).transpose(0, 1)


def half_attention(q_RNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, scale: float) -> Tensor:
    """Compute one request's causal attention ``[R, N, H]`` the way kernels for 16-bit types do.

    Logits and softmax are float32; the weights are rounded to the type of ``q_RNH``, and so is their product with the
    values, which is summed in float32. Float32 and float64 have no such steps.
    """
    new, total = q_RNH.shape[0], k_SKH.shape[0]
    group = q_RNH.shape[1] // k_SKH.shape[1]
    q_NRH = q_RNH.float().transpose(0, 1)
    k_NSH, v_NSH = (
        kv.float().repeat_interleave(group, dim=1).transpose(0, 1) for kv in (k_SKH, v_SKH)
    )
    seen_RS = torch.ones(new, total, dtype=torch.bool, device=q_RNH.device).tril(total - new)
    logits_NRS = (q_NRH @ k_NSH.mT * scale).masked_fill(~seen_RS, float("-inf"))
    weights_NRS = logits_NRS.softmax(dim=-1).to(q_RNH.dtype)
    return (weights_NRS.float() @ v_NSH).to(q_RNH.dtype).transpose(0, 1)


def low_attention(q_RNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, *, scale: float) -> Tensor:
    """Compute one request's causal attention as exactly as kernels for its type and device are, and no more."""
    if q_RNH.dtype.itemsize == 2:
        return half_attention(q_RNH, k_SKH, v_SKH, scale=scale)
    matmul = tensor_core_matmul if q_RNH.is_cuda else sequential_matmul
    return causal_attention(q_RNH, k_SKH, v_SKH, scale=scale, dtype=q_RNH.dtype, matmul=matmul)


def sequential_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, adding up one part after the other: the least exact of the orders that kernels sum in.

    Blocked sums, as in ``torch.matmul``, err so little on a few rows that they say nothing of what rounding does in
    another order. A product over a head has one number in each part, a longer one several.
    """
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for part in range(min(_PARTS, a.shape[-1])):
        total += a[..., part::_PARTS] @ b[..., part::_PARTS, :]
    return total


def tensor_core_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply float32 matrices the way tensor cores do: as three products of numbers with 10-bit mantissas.

    It is how CUTLASS serves float32 on GPUs from compute capability 8.0 on (``OpMultiplyAddFastF32``), and a few times
    less exact than float32 arithmetic.
    """
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    high = _short(x)
    return high, _short(x - high)


def _short(x: Tensor) -> Tensor:
    """Cut a float32 mantissa to 10 bits."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
