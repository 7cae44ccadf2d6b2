"""Which backends a run is about, variant by variant, and why others cannot be used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bcg_core import (
    AttentionBackend,
    BackendLoadError,
    BackendOptionError,
    BackendRegistry,
    Capabilities,
    UnknownBackendError,
)
from bcg_core.errors import PASSED_ON
from bcg_core.option_forms import option_text
from bcg_core.registry import select_class
from bcg_core.text_options import read_options
from bcg_harness.errors import HarnessError
from bcg_harness.outcome import CheckResult, Outcome


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Name a backend with the options that choose one of its variants.

    Attributes:
        name: as it is registered.
        backend: the registered class.
        options: for ``bcg_core.create_backend``.
    """

    name: str
    backend: type[AttentionBackend]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the name, with the options in brackets if there are any."""
        return label_of(self.name, self.options)

    @property
    def selected(self) -> type[AttentionBackend]:
        """Return the class that the options select, which has the capabilities; raises BackendOptionError for none."""
        return select_class(self.name, self.backend, self.options)[0]


def label_of(name: str, options: Mapping[str, Any]) -> str:
    """Return ``name``, with ``options`` in brackets if there are any."""
    if not options:
        return name
    return f"{name}[{','.join(f'{key}={option_text(value)}' for key, value in options.items())}]"


def parse_label(label: str) -> tuple[str, dict[str, str]]:
    """Split what ``label_of`` makes into name and options as text; raises HarnessError for anything else."""
    name, bracket, rest = label.partition("[")
    if not bracket:
        return name, {}
    pairs = [pair.partition("=") for pair in rest.removesuffix("]").split(",")]
    if not rest.endswith("]") or not all(key and value for key, _, value in pairs):
        raise HarnessError(f"backend {label!r} is not of the form name or name[option=value,...]")
    options = {key: value for key, _, value in pairs}
    if len(options) < len(pairs):
        raise HarnessError(f"backend {label!r} has an option twice: keep one")
    return name, options


def name_note(candidate: Candidate) -> str | None:
    """Say that the class of ``candidate`` carries another name than it is registered under; None when it does not."""
    name, own = candidate.name, candidate.backend.name
    if own == name or ":" in name:  # a class that nobody registers goes by its place
        return None
    return f"registered as {name!r}, but its class has name = {own!r}: errors may show either; make them one"


def select_backends(
    names: Sequence[str],
    registry: BackendRegistry,
    *,
    device: torch.device,
    required: bool,
    option_prefix: str = "--",
) -> tuple[list[Candidate], list[CheckResult]]:
    """Load the backends called ``names``, all variants or the labelled one, and say why others cannot be used.

    What does not run on this kind of ``device`` is skipped, and what is not installed is skipped with its install hint.
    With ``required``, for backends that were asked for by name, the latter is an error unless another variant of the
    backend is there. Whatever else a plug-in gets wrong, from its import on, is an error of its own and hides no other.
    Options of a label are text, and become what the backend's constructor takes (``bcg_core.text_options``).
    Raises UnknownBackendError, with the known names, for a name that nobody registers, and BackendOptionError for a
    label with options that the backend does not take, or not with such a value.

    ``option_prefix`` is what the options of the command at hand begin with, for advice.
    """
    usable: list[Candidate] = []
    others: list[CheckResult] = []
    registered = set(registry.names())
    for label in dict.fromkeys(names):
        # A registered name that is no label fails to load, for itself alone.
        name, chosen = (label, {}) if label in registered else parse_label(label)
        try:
            backend = registry.load(name)
            found = [
                Candidate(name=name, backend=backend, options=options)
                for options in (
                    [read_options(name, backend, chosen)] if chosen else variants_of(name, backend)
                )
            ]
            missing = [candidate.selected.unavailable() for candidate in found]
            limits = [_device_limit(candidate, device, option_prefix) for candidate in found]
        except (UnknownBackendError, *PASSED_ON):
            raise
        except BaseException as error:  # a broken plug-in hides no other
            if chosen and isinstance(error, BackendOptionError):
                raise
            others.append(CheckResult.broken(error, backend=label))
            continue
        outcome = Outcome.ERROR if required and all(missing) else Outcome.SKIPPED
        for candidate, limit, reason in zip(found, limits, missing, strict=True):
            if limit is not None:
                others.append(CheckResult.skip(limit, backend=candidate.label, declared=True))
            elif reason is not None:
                others.append(CheckResult(outcome=outcome, backend=candidate.label, detail=reason))
            else:
                usable.append(candidate)
    return usable, others


def variants_of(name: str, backend: type[AttentionBackend]) -> Sequence[Mapping[str, Any]]:
    """Return the options of every variant of ``backend``; raises BackendLoadError when there are none."""
    variants = list(backend.variants())
    if not variants:
        raise BackendLoadError(
            name, "variants() is empty: it has to name at least one set of options, {} for none"
        )
    return variants


def _device_limit(candidate: Candidate, device: torch.device, option_prefix: str) -> str | None:
    """Say that ``candidate`` does not run on this kind of ``device``; None when it does."""
    capabilities = candidate.selected.capabilities
    if not isinstance(capabilities, Capabilities):
        raise BackendLoadError(
            candidate.label, f"capabilities is {capabilities!r}, expected a bcg_core.Capabilities"
        )
    devices = sorted(capabilities.devices)
    if device.type in devices:
        return None
    advice = f" (try {option_prefix}device {devices[0]})" if devices else ""
    return f"devices: runs on {', '.join(devices) or 'none'}, not on {device.type}{advice}"
