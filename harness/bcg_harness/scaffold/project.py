"""The files of a new plug-in."""

from importlib.resources import files
from pathlib import Path
from string import Template

from bcg_harness.errors import HarnessError
from bcg_harness.scaffold.names import PluginNames

_TARGETS = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "README.md.template",
    "src/{module}/__init__.py": "init.py.template",
    "src/{module}/attention.py": "attention.py.template",
    "tests/test_backend.py": "test_backend.py.template",
}


def write_project(names: PluginNames, folder: Path) -> list[Path]:
    """Write a plug-in into ``folder``, which must be new or empty, and return the paths of its files.

    Raises HarnessError where something is in the way, and then has written nothing.
    """
    templates = files("bcg_harness.scaffold") / "templates"
    texts = {
        folder / target.format(module=names.module): (templates / source).read_text(
            encoding="utf-8"
        )
        for target, source in _TARGETS.items()
    }
    try:
        if folder.exists() and any(folder.iterdir()):
            raise HarnessError(
                f"{folder} is not empty: give another place with --directory, or empty it"
            )
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(text).substitute(vars(names)), encoding="utf-8")
    except OSError as error:
        raise HarnessError(
            f"cannot write {error.filename}: {error.strerror}; give a folder that you may write to with --directory"
        ) from error
    return list(texts)
