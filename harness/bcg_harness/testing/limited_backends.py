"""Correct backends with limits, which the harness has to respect."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from bcg_core import AttentionBackend, Capabilities
from bcg_harness.testing.mask_backend import MaskBackend


class NotInstalled(MaskBackend):
    """Need a library that is not there."""

    name: ClassVar[str] = "not-installed"

    @classmethod
    def unavailable(cls) -> str | None:
        """Give an install hint."""
        return "no such library: pip install gone"


class NoPrefix(MaskBackend):
    """Declare that cached prefixes are not served."""

    name: ClassVar[str] = "no-prefix"
    capabilities: ClassVar[Capabilities] = replace(MaskBackend.capabilities, cached_prefix=False)


class NoFloat32(MaskBackend):
    """Declare bfloat16 alone."""

    name: ClassVar[str] = "no-float32"
    capabilities: ClassVar[Capabilities] = replace(
        MaskBackend.capabilities, dtypes=frozenset({torch.bfloat16})
    )


class Variants(MaskBackend):
    """Cover a library of three versions, of which the last is not installed."""

    name: ClassVar[str] = "variants"

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        """Name the versions."""
        return [{"version": version} for version in (1, 2, 3)]

    @classmethod
    def select(cls, options: Mapping[str, Any]) -> tuple[type[AttentionBackend], dict[str, Any]]:
        """Choose a class by version."""
        rest = dict(options)
        classes: dict[int, type[AttentionBackend]] = {1: NoPrefix, 2: MaskBackend, 3: NotInstalled}
        return classes[rest.pop("version", 2)], rest
