"""What a backend declares that a run did not touch: one run has one model, one type, one page size and one device."""

from dataclasses import dataclass
from typing import Any

import torch

from bcg_core import AttentionSpec, Capabilities
from bcg_harness.environment import dtype_name


@dataclass(frozen=True, kw_only=True)
class Untested:
    """List what is declared and not tested.

    Attributes:
        dtypes: names of types.
        head_dims: head dims; None when any is declared.
        groups: whether other numbers of query heads a KV head are declared.
        page_sizes: what other page sizes are multiples of.
        devices: types of devices.
    """

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...] | None
    groups: bool
    page_sizes: int
    devices: tuple[str, ...]

    @classmethod
    def of(
        cls, capabilities: Capabilities, spec: AttentionSpec, device: torch.device
    ) -> "Untested":
        """Compare what is declared with what a run on ``spec`` and ``device`` touches."""
        head_dims = capabilities.head_dims
        return cls(
            dtypes=tuple(sorted(map(dtype_name, capabilities.dtypes - {spec.dtype}))),
            head_dims=None if head_dims is None else tuple(sorted(head_dims - {spec.head_dim})),
            groups=capabilities.gqa,
            page_sizes=capabilities.page_multiple,
            devices=tuple(sorted(capabilities.devices - {device.type})),
        )

    def __str__(self) -> str:
        """Say it in one line."""
        pages = f" (multiples of {self.page_sizes})" if self.page_sizes > 1 else ""
        head_dims = ", ".join(map(str, self.head_dims or ()))
        parts = [
            ", ".join(self.dtypes),
            "other head dims" if self.head_dims is None else head_dims and f"head dims {head_dims}",
            "other head groups" if self.groups else "",
            f"other page sizes{pages}",
            ", ".join(self.devices),
        ]
        return f"declared, not tested here: {'; '.join(filter(None, parts))}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of the attributes."""
        return dict(vars(self))
