"""The names of a new plug-in, all made from one."""

import keyword
import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec

from bcg_core import ENTRY_POINT_GROUP
from bcg_harness.errors import HarnessError

_DISTRIBUTION = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SEPARATORS = re.compile(r"[-_.]+")


@dataclass(frozen=True, kw_only=True)
class PluginNames:
    """Hold the names that the files of a plug-in use.

    Attributes:
        name: of the distribution and of the backend, as it was given.
        module: to import.
        class_name: of the backend's class.
    """

    name: str
    module: str
    class_name: str

    @classmethod
    def of(cls, name: str) -> "PluginNames":
        """Derive all names from ``name``; raises HarnessError for one that cannot be used or that is taken."""
        if not _DISTRIBUTION.fullmatch(name):
            raise HarnessError(
                f"{name!r} is no name for a plug-in: begin with a letter, end with a letter or a digit, and use these, "
                "'-', '_' and '.' between, as in 'my-kernel'"
            )
        words = _SEPARATORS.split(name.lower())
        module = "_".join(words)
        if keyword.iskeyword(module):
            raise HarnessError(
                f"{name!r} is a word of Python: choose another, such as {name}-attention"
            )
        if name in entry_points(group=ENTRY_POINT_GROUP).names:
            raise HarnessError(
                f"an attention backend called {name!r} is registered already: choose another name, or uninstall it"
            )
        if find_spec(module) is not None:
            raise HarnessError(
                f"a module called {module!r} can be imported already, and would hide the plug-in's or be hidden by it: "
                f"choose another name, such as {name}-attention"
            )
        return cls(
            name=name, module=module, class_name="".join(w.capitalize() for w in words) + "Backend"
        )
