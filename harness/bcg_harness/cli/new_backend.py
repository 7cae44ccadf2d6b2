"""Define ``bcg new-backend``."""

from pathlib import Path
from typing import Annotated

import typer


def new_backend(
    name: Annotated[
        str,
        typer.Argument(
            help="Of the distribution and of the backend, such as my-kernel.", show_default=False
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            help="New or empty folder to write to. Default: one of that name, here.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Write a small plug-in that registers a backend, to be edited.

    It attends with torch's SDPA, and passes all checks as it is.

    **Examples**

        bcg new-backend my-kernel
        pip install -e './my-kernel[test]'
        bcg check --backend my-kernel
    """
    from bcg_harness.cli_new_backend import new_backend

    new_backend(name, directory)
