"""Find attention backends among the installed distributions, and make them by name.

A distribution registers a backend class under any name in the entry-point group ``bcg.attention_backends``. Looking at
the names loads nothing; a broken entry point is an error for its own name only.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch

from bcg_core.backend import AttentionBackend, Capabilities
from bcg_core.errors import (
    BackendLoadError,
    BackendOptionError,
    BackendUnavailableError,
    DuplicateBackendError,
    UnknownBackendError,
    UnsupportedSpecError,
)
from bcg_core.spec import AttentionSpec, BackendLimits

ENTRY_POINT_GROUP = "bcg.attention_backends"


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
        try:
            loaded = point.load()
        except (Exception, SystemExit) as error:
            raise BackendLoadError(
                name, f"entry point {point.value!r} of {_owner(point)} failed to load: {error!r}"
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, AttentionBackend)):
            raise BackendLoadError(
                name,
                f"entry point {point.value!r} of {_owner(point)} is no AttentionBackend subclass",
            )
        undefined = [what for what in ("name", "capabilities") if not hasattr(loaded, what)]
        if "select" not in vars(loaded):  # a class that selects others may itself be abstract
            undefined += sorted(loaded.__abstractmethods__)
        if undefined:
            raise BackendLoadError(
                name,
                f"entry point {point.value!r} of {_owner(point)} does not define {', '.join(undefined)}",
            )
        if not isinstance(loaded.capabilities, Capabilities):
            raise BackendLoadError(
                name,
                f"entry point {point.value!r} of {_owner(point)} has capabilities that are no Capabilities: "
                f"{loaded.capabilities!r}",
            )
        return loaded

    def create(
        self,
        name: str,
        spec: AttentionSpec,
        limits: BackendLimits,
        device: torch.device,
        **options: Any,
    ) -> AttentionBackend:
        """Make the backend called ``name`` for ``spec``, passing ``options`` to its constructor.

        Raises, besides what ``load`` raises, BackendUnavailableError with the install hint, UnsupportedSpecError naming
        the limit, and BackendOptionError for options the backend does not take.
        """
        return _create(name, self.load(name), spec, limits, device, options)


def create_backend(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    limits: BackendLimits,
    device: torch.device,
    **options: Any,
) -> AttentionBackend:
    """Make a backend from its class, or the one it selects; errors as in ``BackendRegistry.create``."""
    return _create(backend.name, backend, spec, limits, device, options)


def _create(
    asked: str,
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    limits: BackendLimits,
    device: torch.device,
    options: Mapping[str, Any],
) -> AttentionBackend:
    try:
        backend, left = backend.select(options)
    except BackendOptionError as error:
        if error.backend != asked:
            error.add_note(f"asked for as {asked!r}")
        raise
    # Errors carry the name that was asked for, which need not be that of the class that serves it.
    which = "" if backend.name == asked else f"{backend.name}: "
    missing = backend.unavailable()
    if missing is not None:
        raise BackendUnavailableError(asked, which + missing)
    reason = backend.unsupported(spec, device)
    if reason is not None:
        raise UnsupportedSpecError(asked, which + reason)
    try:
        signature(backend).bind(spec, limits, device, **left)
    except TypeError as error:
        raise BackendOptionError(asked, f"{which}options {sorted(left)}: {error}") from error
    return backend(spec, limits, device, **left)


def _installed() -> dict[str, list[EntryPoint]]:
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        points.setdefault(point.name, []).append(point)
    return points


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"
