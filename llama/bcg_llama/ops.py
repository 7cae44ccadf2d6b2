"""The element-wise work of a Llama, plain or compiled into one kernel each.

Shape letters: T bucket (padded) tokens, D model dim, F MLP intermediate or rotated pairs, A query and key heads,
H head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return ``x_TD`` scaled to a mean square of 1, computed in float32, times ``weight_D`` in its own dtype."""
    x = x_TD.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * x.to(x_TD.dtype)


def add_rms_norm(
    residual_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the new residual stream ``residual_TD + delta_TD``, and its ``rms_norm``."""
    residual_TD = residual_TD + delta_TD
    return residual_TD, rms_norm(residual_TD, weight_D, eps)


def rotate_(x_TAH: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
    """Rotate every head in place: element f of the first half with element f of the second, in float32.

    ``x_TAH`` may be strided; the tables are float32, one row per token.
    """
    first_TAF, second_TAF = x_TAH.float().chunk(2, dim=-1)
    cos_T1F, sin_T1F = cos_TF[:, None], sin_TF[:, None]
    rotated = (
        first_TAF * cos_T1F - second_TAF * sin_T1F,
        second_TAF * cos_T1F + first_TAF * sin_T1F,
    )
    x_TAH.copy_(torch.cat(rotated, dim=-1))


def silu_mul(gate_up_TX: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``[T, F]`` of rows ``[gate (F) | up (F)]``."""
    gate_TF, up_TF = gate_up_TX.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


@dataclass(frozen=True, kw_only=True)
class ElementwiseOps:
    """Hold one implementation of each element-wise function; see the functions of the same name."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_: Callable[[Tensor, Tensor, Tensor], None]
    silu_mul: Callable[[Tensor], Tensor]

    @classmethod
    def plain(cls) -> "ElementwiseOps":
        """Return the functions as they are: several kernels each."""
        return cls(rms_norm=rms_norm, add_rms_norm=add_rms_norm, rotate_=rotate_, silu_mul=silu_mul)

    @classmethod
    def compiled(cls) -> "ElementwiseOps":
        """Return the functions compiled by ``torch.compile``, to be shared by all layers of one model.

        Compilation happens at the first call, which therefore must not be inside a capture: warm up first, in the
        grad mode of the capture. The number of tokens stays symbolic, so that buckets share one kernel (one token has
        a kernel of its own). Inside somebody else's ``torch.compile`` the functions are plain.
        """
        return cls(
            rms_norm=_compile(rms_norm),
            add_rms_norm=_compile(add_rms_norm),
            rotate_=_compile(rotate_),
            silu_mul=_compile(silu_mul),
        )


def with_own_code(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, which must have no defaults and no closure, with a code object of its own.

    ``torch.compile`` keeps its kernels, and a limit on them, on the code object: a copy gives each model its own. Ends
    with torch 2.12 as minimum: ``torch.compile(..., isolate_recompiles=True)``, pytorch/pytorch#178351.
    """
    plain = cast("FunctionType", function)
    own = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
    return cast("Callable[P, R]", own)


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` with the first dimension of its rows, and nothing else, dynamic.

    Not ``dynamic=True``, which makes the model's widths symbolic too (slower reductions) and gives equal sizes one
    symbol: a bucket as long as the model is wide would get a second kernel that a later call may or may not pick.
    """
    compiled: Callable[P, R] = torch.compile(with_own_code(function), fullgraph=True)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        # Rows have two dimensions or more, weights have one; one row is specialised by torch.compile in any case.
        for arg in args:
            if isinstance(arg, Tensor) and arg.dim() > 1 and arg.shape[0] > 1:
                torch._dynamo.mark_dynamic(arg, 0)
        return compiled(*args, **kwargs)

    return call
