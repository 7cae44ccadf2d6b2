"""``bcg new-backend``: write a plug-in that works, to be edited."""

from pathlib import Path

import typer

from bcg_harness.cli_errors import usage_errors
from bcg_harness.scaffold.names import PluginNames
from bcg_harness.scaffold.project import write_project


def new_backend(name: str, directory: Path | None) -> None:
    """Write the plug-in ``name``, by default into a folder of its name, and say what to do next."""
    folder = Path(name) if directory is None else directory
    with usage_errors():
        names = PluginNames.of(name)
        paths = write_project(names, folder)
    for path in paths:
        typer.echo(f"wrote {path}")
    typer.echo(
        f"\nIt attends with torch's SDPA. Prove that, then put your kernel into src/{names.module}/attention.py:\n\n"
        f"  cd {folder}\n  pip install -e '.[test]'\n  bcg check --backend {name}\n  pytest"
    )
