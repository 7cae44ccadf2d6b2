"""Torch's warning of a CUDA graph without work, which is how it tells that a graph is empty."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def warnings_of_empty_graphs(action: Literal["ignore", "error"]) -> Iterator[None]:
    """Ignore the warning while the block runs, or raise it as UserWarning."""
    with warnings.catch_warnings():
        warnings.filterwarnings(action, message="The CUDA Graph is empty")
        yield
