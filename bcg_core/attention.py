"""Attention by its definition: slow, in any type, and what every backend is judged by.

Shape letters: R new tokens of one request, S its tokens from the first on, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor


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
