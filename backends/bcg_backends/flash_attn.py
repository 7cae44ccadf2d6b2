"""FlashAttention: choose among versions 2, 3 and 4.

The three are three libraries with three calling conventions. The public Python wrappers of none of them take both
``out`` and a page table, so each version's module calls the layer below. Versions tried are in the README.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bcg_backends.varlen import VarlenBackend
from bcg_backends.vendor import FLASH_KERNEL, refuse_head_dim
from bcg_core import AttentionBackend, AttentionSpec, BackendOptionError


class FlashAttentionBackend(VarlenBackend):
    """Choose among the installed versions of FlashAttention; option ``version`` is 2, 3, 4 or "auto".

    "auto" takes the first that is installed and runs on this GPU, in the order 3, 4, 2.
    """

    name = "flash_attn"
    capabilities = replace(FLASH_KERNEL, supports_out=True, supports_full_graph=True)

    @classmethod
    def variants(cls) -> list[dict[str, Any]]:
        """Return one set of options per version."""
        return [{"version": version} for version in (2, 3, 4)]

    @classmethod
    def select(cls, options: Mapping[str, Any]) -> tuple[type[AttentionBackend], dict[str, Any]]:
        """Return the class of the chosen version, and the options left for it."""
        if cls is not FlashAttentionBackend:
            return cls, dict(options)
        rest = dict(options)
        version = str(rest.pop("version", "auto"))
        versions = _versions()
        if version in versions:
            return versions[version], rest
        if version != "auto":
            raise BackendOptionError(cls.name, f"version is 2, 3, 4 or auto, not {version}")
        installed = [each for each in versions.values() if each.unavailable() is None]
        usable = [each for each in installed if each.runs_on_this_gpu()]
        return next(iter(usable or installed), cls), rest

    @classmethod
    def runs_on_this_gpu(cls) -> bool:
        """Tell whether the version has kernels for the current GPU; True where there is none."""
        least = cls.capabilities.min_compute_capability
        assert least is not None, "every version declares one"
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= least

    @classmethod
    def unavailable(cls) -> str | None:
        """Say what each version lacks, when none can run."""
        reasons = [each.unavailable() for each in _versions().values()]
        return None if None in reasons else "; ".join(filter(None, reasons))

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add what all versions need of the head dim."""
        return super().unsupported(spec, device) or refuse_head_dim(spec)


def _versions() -> dict[str, type[FlashAttentionBackend]]:
    """Return the classes by version, in the order in which "auto" tries them."""
    from bcg_backends.flash_attn_2 import FlashAttention2
    from bcg_backends.flash_attn_3 import FlashAttention3
    from bcg_backends.flash_attn_4 import FlashAttention4

    return {"3": FlashAttention3, "4": FlashAttention4, "2": FlashAttention2}
