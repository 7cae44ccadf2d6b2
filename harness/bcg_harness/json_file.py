"""Results as JSON files."""

import json
from pathlib import Path
from typing import Any

from bcg_harness.errors import HarnessError
from bcg_harness.selection import read_text


def read_json(path: Path) -> Any:
    """Return what the JSON file ``path`` holds; raises HarnessError where that is not possible."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HarnessError(f"{path} is no JSON: {error}") from error


def write_json(content: Any, path: Path) -> None:
    """Write ``content`` to ``path``; raises HarnessError where that is not possible."""
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise HarnessError(f"cannot write {path}: {error}") from error


def require_writable(path: Path) -> None:
    """Raise HarnessError for a path that cannot be written, before hours are spent on what belongs there.

    Writes a line break, without which a full device does not tell, and takes it back; what cannot be cut, such as a
    pipe, keeps it, which JSON allows.
    """
    existed = path.exists()
    try:
        with path.open("ab") as file:
            size = file.tell() if path.is_file() else None
            file.write(b"\n")
            file.flush()
            if size is not None:
                file.truncate(size)
        if not existed:
            path.unlink()
    except OSError as error:
        raise HarnessError(
            f"cannot write {path}: {error.strerror}; give a file in an existing directory that you may write to"
        ) from error


def require_folder(path: Path) -> None:
    """Make the folder ``path`` unless it is there; raises HarnessError where files cannot be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(f"cannot make the folder {path}: {error.strerror}") from error
    require_writable(path / "probe.json")
