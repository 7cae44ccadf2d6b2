"""When Python may collect garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage, then hold collection off while the block runs.

    Where collection is off already, in another such block for instance, do nothing: a collection takes a tenth of a
    second and more in a large process, too much to repeat for every bucket.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
