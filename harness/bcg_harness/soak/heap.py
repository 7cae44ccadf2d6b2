"""What C code, torch's and the driver's with it, holds in memory that ``malloc`` gave out."""

import ctypes
from functools import cache
from typing import Any


class _MallInfo(ctypes.Structure):
    """Mirror glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def no_heap_size() -> str | None:
    """Return why ``heap_bytes`` cannot be had; None when it can."""
    if hasattr(ctypes.CDLL(None), "mallinfo2"):
        return None
    return "the C library has no mallinfo2, which glibc has from 2.33 on"


def heap_bytes() -> int:
    """Return the bytes in use, all arenas and large blocks together.

    Free memory that malloc keeps does not count, which makes this far steadier than what the process has resident.
    """
    info = _mallinfo2()()
    return int(info.uordblks + info.hblkhd)


@cache
def _mallinfo2() -> Any:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _MallInfo
    return function
