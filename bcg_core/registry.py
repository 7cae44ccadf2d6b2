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

from bcg_core.backend import AttentionBackend
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
        except Exception as error:
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
        return create_backend(self.load(name), spec, limits, device, **options)


def create_backend(
    backend: type[AttentionBackend],
    spec: AttentionSpec,
    limits: BackendLimits,
    device: torch.device,
    **options: Any,
) -> AttentionBackend:
    """Make a backend from its class, or the one it selects; errors as in ``BackendRegistry.create``."""
    backend, options = backend.select(options)
    missing = backend.unavailable()
    if missing is not None:
        raise BackendUnavailableError(backend.name, missing)
    reason = backend.unsupported(spec, device)
    if reason is not None:
        raise UnsupportedSpecError(backend.name, reason)
    try:
        signature(backend).bind(spec, limits, device, **options)
    except TypeError as error:
        raise BackendOptionError(backend.name, f"options {sorted(options)}: {error}") from error
    return backend(spec, limits, device, **options)


def _installed() -> dict[str, list[EntryPoint]]:
    points: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        # The same distribution can be on the path twice (an editable install and its build); count it once.
        points.setdefault(point.name, {})[_owner(point), point.value] = point
    return {name: list(found.values()) for name, found in points.items()}


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"
