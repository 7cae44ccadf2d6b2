"""The lines of a trace with their numbers, and errors that name them."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from bcg_harness.errors import HarnessError

_Read = TypeVar("_Read")

Lines = Iterable[tuple[int, str]]
"""Line numbers, from 1, with what stands there; blank lines are left out."""


def read_each(lines: Lines, read: Callable[[str], _Read]) -> Iterator[tuple[int, _Read]]:
    """Yield what ``read`` makes of each line, with its number; raises its HarnessError with the number."""
    for number, line in lines:
        try:
            yield number, read(line)
        except HarnessError as error:
            raise HarnessError(f"line {number}: {error}") from error
