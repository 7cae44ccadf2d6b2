"""What must not grow while a process serves: how each is read, and how much is still no growth."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bcg_harness.soak.heap import heap_bytes, no_heap_size
from bcg_harness.soak.objects import count_objects, count_tensors

MOST_SAMPLES = 200
"""Readings of a run: the progress bar moves, and remembers having moved, once at each."""

_STATM = Path("/proc/self/statm")
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Describe something that is watched.

    Attributes:
        name: for tables and JSON.
        in_bytes: whether it is a size; otherwise it is a number of things.
        allowed: growth, over the whole run, up to which all is well.
        why: what justifies ``allowed``.
        read: returns the value for a device, which must be idle.
        missing: returns why it cannot be read for a device; None when it can.
    """

    name: str
    in_bytes: bool
    allowed: int
    why: str
    read: Callable[[torch.device], int]
    missing: Callable[[torch.device], str | None]


def _no_gpu(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "no GPU is used"


def _no_proc(device: torch.device) -> str | None:
    return None if _STATM.exists() else f"there is no {_STATM} here"


def _never(device: torch.device) -> str | None:
    return None


def _of_other_software(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _resident(device: torch.device) -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


QUANTITIES = (
    Quantity(
        name="device memory, live tensors",
        in_bytes=True,
        allowed=0,
        why="the same tensors live whenever it is read; counted as asked for, because what a tensor gets depends on "
        "the block that it is cut from",
        read=lambda device: int(torch.cuda.memory_stats(device)["requested_bytes.all.current"]),
        missing=_no_gpu,
    ),
    Quantity(
        name="device memory, reserved by torch",
        in_bytes=True,
        allowed=0,
        why="the largest batches were served first, so everything later fits into what they left",
        read=torch.cuda.memory_reserved,
        missing=_no_gpu,
    ),
    Quantity(
        name="device memory, all other",
        in_bytes=True,
        allowed=32 * 2**20,
        why="the driver loads kernels when they are first used, 2 MiB at a time; other processes count too",
        read=_of_other_software,
        missing=_no_gpu,
    ),
    Quantity(
        name="pinned host memory",
        in_bytes=True,
        allowed=0,
        why="as for reserved device memory: blocks are used again",
        read=lambda device: int(torch.cuda.host_memory_stats()["allocated_bytes.current"]),
        missing=_no_gpu,
    ),
    Quantity(
        name="resident host memory",
        in_bytes=True,
        allowed=16 * 2**20,
        why="malloc gives memory back late, a few MiB more or less each time",
        read=_resident,
        missing=_no_proc,
    ),
    Quantity(
        name="host memory that malloc gave out",
        in_bytes=True,
        allowed=2**20,
        why="caches of the libraries fill up slowly; a leak of 100 bytes a replay is more in a run of 20,000",
        read=lambda device: heap_bytes(),
        missing=lambda device: no_heap_size(),
    ),
    Quantity(
        name="tensors that Python holds",
        in_bytes=False,
        allowed=0,
        why="the same tensors live whenever it is read",
        read=lambda device: count_tensors(),
        missing=_never,
    ),
    Quantity(
        name="objects that Python can collect",
        in_bytes=False,
        allowed=MOST_SAMPLES,
        why="the progress bar remembers its moves for a while, one a sample",
        read=lambda device: count_objects(),
        missing=_never,
    ),
    Quantity(
        name="memory blocks of Python",
        in_bytes=False,
        allowed=5 * MOST_SAMPLES,
        why="three for each move of the bar; caches of the standard library and of torch fill up slowly",
        read=lambda device: sys.getallocatedblocks(),
        missing=_never,
    ),
    Quantity(
        name="open files",
        in_bytes=False,
        allowed=0,
        why="serving opens none",
        read=lambda device: sum(1 for _ in _DESCRIPTORS.iterdir()),
        missing=_no_proc,
    ),
)
"""All that is watched, in the order of tables."""
