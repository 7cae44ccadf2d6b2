"""Define ``bcg report``."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results of bcg bench --json.", metavar="FILE...", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the page here. Default: beside the first file, under its name.",
            metavar="FILE.html",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Write a picture of each chart into this folder, for day and for night. Default: PAGE-charts.",
            metavar="DIR",
        ),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Leave the pictures out.")
    ] = True,
) -> None:
    """Make one HTML page, which needs no network, and pictures out of results of bcg bench.

    Several runs share the page. Each is compared with the one before it of the same model on the same hardware, on the
    page and here: which medians moved by more than 5 %. Needs the extra `report`.

    **Examples**

        bcg report out.json                            out.html and out-charts/
        bcg report before.json after.json              both, and what moved between them
        bcg report out.json --output page.html --no-pictures
    """
    from bcg_harness.cli_report import ReportOptions, write_report

    write_report(ReportOptions(files=tuple(files), output=output, png=png, pictures=pictures))
