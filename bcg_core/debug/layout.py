"""Where a tensor lies and how it is laid out: what a recorded segment has baked in."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Hold address and geometry of a tensor, without holding the tensor.

    Attributes:
        address: of its first element.
        shape: its size.
        stride: in elements.
        dtype: element type.
        device: where it lives.
    """

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Return the layout that ``tensor`` has now."""
        return cls(
            address=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            device=tensor.device,
        )

    def change_to(self, now: "Layout") -> str | None:
        """Say how ``now`` differs from this layout at capture; None when it does not."""
        then = {field.name: getattr(self, field.name) for field in fields(self)}
        differing = {name: old for name, old in then.items() if old != getattr(now, name)}
        if not differing:
            return None
        return ", ".join(
            f"{name} was {_shown(old)} at capture, is {_shown(getattr(now, name))} now"
            for name, old in differing.items()
        )


def _shown(value: object) -> str:
    return hex(value) if isinstance(value, int) else str(value)
