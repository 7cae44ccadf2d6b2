"""What adapters ask about vendor libraries: can it be imported, and does it take this shape."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from bcg_core import AttentionSpec, Capabilities

FLASH_KERNEL = Capabilities(
    dtypes=frozenset({torch.float16, torch.bfloat16}),
    head_dims=None,
    min_compute_capability=(8, 0),
    gqa=True,
    cached_prefix=True,
    ignores_foreign_nan=True,
    needs_host_plan=False,
    deterministic=True,
)
"""What kernels of FlashAttention 2's lineage have in common; ``refuse_head_dim`` goes with it."""


def import_error(module: str, hint: str, *, distribution: str | None = None) -> str | None:
    """Say why ``module`` cannot be imported, with the command ``hint`` that installs it; None when it can.

    ``distribution`` names the distribution it must come from, where several ship a module of that name. Whatever an
    import raises is reported: a vendor's extension that was built for another torch fails in many ways.
    """
    if distribution is not None:
        try:
            version(distribution)
        except PackageNotFoundError:
            return f"{distribution} is not installed: {hint}"
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001  # see above
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None:
            return f"{module} is installed but does not load: {error}"
        if f"{module}.".startswith(f"{missing}."):
            return f"{module} is not installed: {hint}"
        return f"{module} needs {missing}, which is not installed"
    return None


def refuse_head_dim(spec: AttentionSpec) -> str | None:
    """Say why a kernel of FlashAttention 2's lineage cannot serve the head dim; None when it can."""
    if spec.head_dim % 8 or spec.head_dim > 256:
        return f"head_dims: takes multiples of 8 up to 256, not {spec.head_dim}"
    return None
