"""How wrong use ends, with a message that says how to fix it and status 2, and how an interrupt does."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from bcg_core import BcgError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn an error about what the user asked for into a message on stderr and exit status 2."""
    try:
        yield
    except BcgError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        for note in getattr(error, "__notes__", []):
            typer.secho(note, err=True)
        raise typer.Exit(2) from error
