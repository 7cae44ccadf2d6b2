"""Define ``bcg cases``."""

from typing import Annotated

import typer

from bcg_harness.cli.options import BUCKETS, Buckets


def cases(
    buckets: Buckets = BUCKETS,
    page_size: Annotated[
        int, typer.Option(help="Tokens a KV page, as bcg check names it.", min=1, metavar="N")
    ] = 16,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON that --case can read from a file.")
    ] = False,
) -> None:
    """List the built-in cases, as they are for these buckets and pages."""
    from bcg_harness.cli_cases import print_cases

    print_cases(buckets, page_size=page_size, as_json=as_json)
