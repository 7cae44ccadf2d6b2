"""How running out of memory ends: as an error that says what did not fit, and what is smaller."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bcg_harness.errors import HarnessError

_SIGNS = ("allocate memory", "out of memory", "Storage size calculation overflowed")
"""Parts of the messages of the plain RuntimeErrors in which torch's CPU allocator says so."""


@contextmanager
def has_to_fit(what: str, *, hint: str) -> Iterator[None]:
    """Raise HarnessError, with ``hint``, when there is no memory for ``what``, which the block makes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not any(sign in str(error) for sign in _SIGNS):
            raise
        raise HarnessError(f"{what} does not fit in memory: {hint} ({error})") from error
