"""Find attention backends among the installed distributions, and make them by name.

A distribution registers a backend class under any name in the entry-point group ``bcg.attention_backends``. Looking at
the names loads nothing; a broken entry point is an error for its own name only.
"""

import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch

from bcg_core.ambient import neutrally
from bcg_core.backend import AttentionBackend, Capabilities
from bcg_core.current_device import on_device
from bcg_core.errors import (
    PASSED_ON,
    BackendLoadError,
    BackendOptionError,
    BackendUnavailableError,
    DuplicateBackendError,
    UnknownBackendError,
    UnsupportedSpecError,
)
from bcg_core.notes import noting
from bcg_core.spec import AttentionSpec, BackendLimits

ENTRY_POINT_GROUP = "bcg.attention_backends"

_PLAIN = re.compile(r"[\w.:-]+")
"""Names that can be told from options, and from a list; a class that nobody registers goes by ``module:Class``."""


class BackendRegistry:
    """Map names to backend classes.

    Args:
        points: entry points to choose from; default are those of the environment, read once.
    """

    def __init__(self, points: Mapping[str, list[EntryPoint]] | None = None) -> None:
        self._points = MappingProxyType(dict(_installed() if points is None else points))

    def names(self) -> list[str]:
        """Return all registered names, sorted, without loading any."""
        return sorted(self._points)

    def load(self, name: str) -> type[AttentionBackend]:
        """Import and return the backend class called ``name``.

        Raises UnknownBackendError (with the known names), DuplicateBackendError (with the distributions) or
        BackendLoadError (chained to what the import raised).
        """
        points = self._points.get(name)
        if points is None:
            known = ", ".join(self.names()) or "none"
            raise UnknownBackendError(name, f"not registered; known backends: {known}")
        if len(points) > 1:
            owners = " and ".join(sorted(_owner(point) for point in points))
            raise DuplicateBackendError(
                name, f"registered by {owners}: uninstall one of them, or rename its entry point"
            )
        point = points[0]
        what = _described(point)
        if not _PLAIN.fullmatch(name):
            raise BackendLoadError(
                name, f"{what} needs another name: letters, digits, '-', '_' and '.' are possible"
            )
        try:
            loaded = point.load()
        except PASSED_ON:
            raise
        except BaseException as error:
            raise BackendLoadError(
                name, f"{what} failed to load: {type(error).__name__}: {error}"
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, AttentionBackend)):
            raise BackendLoadError(name, f"{what} is no AttentionBackend subclass")
        undefined = [field for field in ("name", "capabilities") if not hasattr(loaded, field)]
        if "select" not in vars(loaded):  # a class that selects others may itself be abstract
            undefined += sorted(loaded.__abstractmethods__)
        if undefined:
            raise BackendLoadError(name, f"{what} does not define {', '.join(undefined)}")
        if not isinstance(loaded.capabilities, Capabilities):
            raise BackendLoadError(
                name,
                f"{what} has capabilities that are no Capabilities: {loaded.capabilities!r}",
            )
        return loaded

    @neutrally("BackendRegistry.create")
    def create(
        self,
        name: str,
        spec: AttentionSpec,
        limits: BackendLimits,
        device: torch.device,
        **options: Any,
    ) -> AttentionBackend:
        """Make the backend called ``name`` for ``spec``, passing ``options`` to its constructor.

        ``device`` is the current one meanwhile.

        Raises, besides what ``load`` raises, BackendUnavailableError with the install hint, UnsupportedSpecError naming
        the limit, and BackendOptionError for options the backend does not take.
        """
        return _create(name, self.load(name), spec, limits, device, options)


@neutrally("create_backend")
def create_backend(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    limits: BackendLimits,
    device: torch.device,
    **options: Any,
) -> AttentionBackend:
    """Make a backend from its class, or the one it selects; errors as in ``BackendRegistry.create``."""
    return _create(backend.name, backend, spec, limits, device, options)


def select_class(
    asked: str, backend: type[AttentionBackend], options: Mapping[str, Any]
) -> tuple[type[AttentionBackend], dict[str, Any]]:
    """Return the class that serves ``options``, with the options left for its constructor, and make nothing.

    Raises BackendOptionError, under the name ``asked``, for options that the backend does not take.
    """
    try:
        selected, left = backend.select(options)
    except BackendOptionError as error:
        if error.backend != asked:
            error.add_note(f"asked for as {asked!r}")
        raise
    spec = limits = device = None  # only names are compared
    taken = signature(selected)
    try:
        taken.bind(spec, limits, device, **left)
    except TypeError as error:
        given = f"options {sorted(left)}" if left else "no options"
        raise BackendOptionError(
            asked,
            f"{_which(asked, selected)}{given}: {error}; a backend is made with (spec, limits, device, **options), and "
            f"{selected.__name__} takes {taken}",
        ) from error
    return selected, left


def _which(asked: str, backend: type[AttentionBackend]) -> str:
    """Begin a message with the class, where errors carry another name: that which was asked for."""
    return "" if backend.name == asked else f"{backend.name}: "


def _create(
    asked: str,
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    limits: BackendLimits,
    device: torch.device,
    options: Mapping[str, Any],
) -> AttentionBackend:
    backend, left = select_class(asked, backend, options)
    which = _which(asked, backend)
    missing = backend.unavailable()
    if missing is not None:
        raise BackendUnavailableError(asked, which + missing)
    reason = backend.unsupported(spec, device)
    if reason is not None:
        raise UnsupportedSpecError(asked, which + reason)
    made_for = f"up to {limits.max_tokens} tokens and {limits.max_requests} requests a batch"
    with on_device(device), noting(f"raised while making backend {asked!r} for {made_for}"):
        return backend(spec, limits, device, **left)


def _installed() -> dict[str, list[EntryPoint]]:
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        points.setdefault(point.name, []).append(point)
    return points


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


def _described(point: EntryPoint) -> str:
    """Say what ``point`` is: of an installed distribution, or a class that somebody named."""
    if point.dist is None:
        return f"class {point.value!r}, which no distribution registers,"
    return f"entry point {point.value!r} of {_owner(point)}"
