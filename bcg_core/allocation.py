"""Large allocations, and the refusal of those that do not fit.

torch has a different error for each way not to fit: beyond the device's memory, beyond 2**63 bytes, beyond 2**63
elements. And a host may hand out memory that it does not have, and end the process when it is written.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bcg_core.errors import BcgError


@contextmanager
def allocating(
    what: str, count: int, unit: str, unit_bytes: int, device: torch.device, error: type[BcgError]
) -> Iterator[None]:
    """Raise ``error`` where ``what``, of ``count`` times ``unit_bytes``, is more than ``device`` has.

    Before the ``with`` block, if it is more than there is at all; from inside of it, chained to torch's error, if it is
    more than is free. The message says how many ``unit`` there is room for.
    """
    total = total_memory(device)
    needed = f"{what} of {count} {unit} takes {_size(count * unit_bytes)}"
    if count * unit_bytes > total:
        raise error(
            f"{needed}, but {device} has {_size(total)} in all: there is room for {total // unit_bytes} {unit} at most"
        )
    try:
        yield
    except (MemoryError, RuntimeError) as raised:
        if not _out_of_memory(raised):
            raise
        free = free_memory(device)
        raise error(
            f"{needed}, but {device} has {_size(free)} free: there is room for {free // unit_bytes} {unit} at most"
        ) from raised


def total_memory(device: torch.device) -> int:
    """Return the bytes that ``device`` has in all; of one that does not say, as many as can be addressed."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _host_memory("SC_PHYS_PAGES") if device.type == "cpu" else sys.maxsize


def free_memory(device: torch.device) -> int:
    """Return the bytes that nobody uses on ``device``; of one that does not say, as many as can be addressed.

    On a GPU, what torch has cached counts as used.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _host_memory("SC_AVPHYS_PAGES") if device.type == "cpu" else sys.maxsize


def _host_memory(pages: str) -> int:
    """Return the bytes of the host's ``pages``, a name of ``sysconf``, where the system knows it."""
    if pages not in getattr(os, "sysconf_names", ()):
        return sys.maxsize
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _out_of_memory(error: Exception) -> bool:
    """Tell an allocation that failed from other errors; of the CPU's allocator, only the message says so."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "DefaultCPUAllocator" in str(error)


def _size(count: int) -> str:
    """Return ``count`` bytes in GiB; an int, as floats end before what may be asked for."""
    tenths = count * 10 // 2**30
    return f"{tenths // 10:,}.{tenths % 10} GiB"
