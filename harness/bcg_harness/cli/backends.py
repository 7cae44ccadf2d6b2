"""Define ``bcg backends``."""

from typing import Annotated

import typer


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the registered attention backends: what each can do, or what is missing to run it."""
    from bcg_harness.cli_backends import print_backends

    print_backends(as_json=as_json)
