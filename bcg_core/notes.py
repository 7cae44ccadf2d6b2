"""Say on an exception where it happened, without touching the exception itself."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to ``error``, unless it is there: one exception object may be raised many times.

    An error that takes no notes stays as it is: it says more than the reason for that.
    """
    with suppress(Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


@contextmanager
def noting(note: str) -> Iterator[None]:
    """Add ``note`` to whatever is raised inside."""
    try:
        yield
    except BaseException as error:
        add_note(error, note)
        raise
