"""Choose a page size that several backends can share."""

from collections.abc import Iterable
from math import lcm

from bcg_core.backend import Capabilities


def negotiate_page_size(backends: Iterable[Capabilities], *, least: int = 16) -> int:
    """Return the smallest page size from ``least`` tokens on that all ``backends`` take and read in place.

    One KV cache can then serve all of them, and one capture every switch between them.
    """
    records = list(backends)
    multiple = lcm(
        *(r.page_multiple for r in records), *(r.preferred_page_multiple for r in records)
    )
    return -(-least // multiple) * multiple
