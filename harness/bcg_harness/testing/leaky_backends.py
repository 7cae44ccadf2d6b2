"""Backends that leave something behind with every batch, or go wrong after many, to prove that a soak finds it."""

import mmap
import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from bcg_core import AttentionSpec, BackendLimits, PrefillBatch
from bcg_harness.testing.mask_backend import MaskBackend


class _Leaky(MaskBackend):
    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self.kept: list[Any] = []

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return what is never let go."""
        raise NotImplementedError

    def init_forward_metadata(self, batch: PrefillBatch) -> Tensor:
        """Keep something for ever."""
        self.kept.append(self.leave_behind(batch))
        return super().init_forward_metadata(batch)


class KeepsBatches(_Leaky):
    """Keep the index tensors of every batch."""

    name: ClassVar[str] = "keeps-batches"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return the tensors that the batch has on the device."""
        return batch.on_device


class KeepsDeviceMemory(_Leaky):
    """Keep a workspace for every batch."""

    name: ClassVar[str] = "keeps-device-memory"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return 256 KiB on the device."""
        return torch.zeros(2**16, device=self.device)


class KeepsPinnedMemory(_Leaky):
    """Keep a staging buffer for every batch; needs a GPU."""

    name: ClassVar[str] = "keeps-pinned-memory"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return 16 KiB of pinned memory."""
        return torch.zeros(2**12, pin_memory=True)


class KeepsObjects(_Leaky):
    """Keep a note of every batch."""

    name: ClassVar[str] = "keeps-objects"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return lists in a list."""
        return [[length] for length in (1, 2, 3, 4)]


class KeepsNumbers(_Leaky):
    """Keep numbers of every batch, which Python has no reason to collect."""

    name: ClassVar[str] = "keeps-numbers"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return a tuple of floats."""
        return tuple(length / 7 for length in range(1, 20))


class KeepsHostMemory(_Leaky):
    """Keep bytes of every batch."""

    name: ClassVar[str] = "keeps-host-memory"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return 256 KiB; they may lie in memory that malloc had kept, which makes nothing more resident."""
        return b"x" * 2**18


class KeepsMappedMemory(_Leaky):
    """Keep memory of the system's, past malloc, for every batch."""

    name: ClassVar[str] = "keeps-mapped-memory"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return 256 KiB that the process has resident."""
        mapped = mmap.mmap(-1, 2**18)
        mapped.write(b"x" * 2**18)
        return mapped


class KeepsFiles(_Leaky):
    """Open a file for every batch."""

    name: ClassVar[str] = "keeps-files"

    def leave_behind(self, batch: PrefillBatch) -> Any:
        """Return an open file's number."""
        return os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        """Close them, so that what runs afterwards has files left to open."""
        for number in self.kept:
            os.close(number)


class WearsOut(MaskBackend):
    """Attend rightly a hundred times, then forget to clear the mask of a bucket."""

    name: ClassVar[str] = "wears-out"
    _updates = 0

    def update_bucket_metadata(self, metadata: Tensor | None, batch: PrefillBatch) -> Tensor:
        """Refresh the mask in place, later without clearing it."""
        assert metadata is not None
        self._updates += 1
        if self._updates <= 100:
            return super().update_bucket_metadata(metadata, batch)
        metadata[: batch.num_tokens].logical_or_(self.init_forward_metadata(batch))
        return metadata
