"""What adapters ask about vendor libraries: can it be imported, and does it take this shape."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from bcg_core import AttentionSpec


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
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            return f"{module} is not installed: {hint}"
        return f"{module} needs {error.name}, which is not installed"
    except Exception as error:  # noqa: BLE001  # see above
        return f"{module} is installed but does not load: {error}"
    return None


def refuse_head_dim(spec: AttentionSpec) -> str | None:
    """Say why a kernel of FlashAttention 2's lineage cannot serve the head dim; None when it can."""
    if spec.head_dim % 8 or spec.head_dim > 256:
        return f"head_dims: takes multiples of 8 up to 256, not {spec.head_dim}"
    return None
