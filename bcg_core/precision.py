"""How exactly torch multiplies matrices: a setting of the process, which recorded kernels took at capture."""

from typing import Any

import torch

from bcg_core.errors import AmbientStateError

_NAMES = (
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def matmul_precision(device: torch.device) -> tuple[Any, ...]:
    """Return what products on ``device`` are allowed now; costs half a microsecond.

    From torch's C functions: its public ones refuse to answer where old and new names were used in one process.
    """
    cuda = device.type == "cuda"
    precision = torch._C._get_fp32_precision_getter("cuda" if cuda else "mkldnn", "matmul")
    return (
        "ieee" if precision == "none" else precision,  # where nobody has set anything
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
    )


def check_matmul_precision(captured: tuple[Any, ...], device: torch.device) -> None:
    """Raise AmbientStateError where replays would compute otherwise than torch is told to now."""
    now = matmul_precision(device)
    if now == captured:
        return
    module = f"torch.backends.{'cuda' if device.type == 'cuda' else 'mkldnn'}.matmul"
    changes = ", ".join(
        f"{module}.{name} was {then} and is {current}"
        for name, then, current in zip(_NAMES, captured, now, strict=True)
        if then != current
    )
    raise AmbientStateError(
        f"prefill would replay kernels that were captured under another precision of matrix products: {changes} "
        "(torch.set_float32_matmul_precision sets it, too). Set it back, or release() and capture() again"
    )
