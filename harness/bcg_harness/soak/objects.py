"""Objects that Python's collector knows, and how to look at those alone that were made since."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def frozen() -> Iterator[None]:
    """Leave all objects that there are out of collections and counts, which then cost as much as was made since."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def count_objects() -> int:
    """Count the objects that Python can collect."""
    return len(gc.get_objects())


def count_tensors() -> int:
    """Count the tensors among them."""
    # By type: an object's own __class__ may be computed, and do anything.
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def count_types() -> Counter[str]:
    """Count them by type."""
    return Counter(
        f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects()
    )
