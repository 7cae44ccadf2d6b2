"""The optional libraries that draw: asked for before anything is read, named when they are missing."""

from importlib.util import find_spec

from bcg_harness.errors import HarnessError

LIBRARIES = ("jinja2", "matplotlib")
"""What the extra ``report`` installs."""


def require_report_extra() -> None:
    """Raise HarnessError, with the command that helps, unless all libraries of the extra are there."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise HarnessError(
            f"reports need {' and '.join(missing)}, which is not installed: "
            "pip install 'breakable-cuda-graph[report]'"
        )
