"""Which backends a run is about, variant by variant, and why others cannot be used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bcg_core import AttentionBackend, BackendRegistry, UnknownBackendError
from bcg_harness.errors import HarnessError
from bcg_harness.outcome import CheckResult, Outcome, describe


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
        """Return the class that the options select, which has the capabilities."""
        return self.backend.select(self.options)[0]


def label_of(name: str, options: Mapping[str, Any]) -> str:
    """Return ``name``, with ``options`` in brackets if there are any."""
    if not options:
        return name
    return f"{name}[{','.join(f'{key}={value}' for key, value in options.items())}]"


def parse_label(label: str) -> tuple[str, dict[str, str]]:
    """Split what ``label_of`` makes into name and options; raises HarnessError for anything else."""
    name, bracket, rest = label.partition("[")
    if not bracket:
        return name, {}
    pairs = [pair.partition("=") for pair in rest.removesuffix("]").split(",")]
    if not rest.endswith("]") or not all(key and value for key, _, value in pairs):
        raise HarnessError(f"backend {label!r} is not of the form name or name[option=value,...]")
    return name, {key: value for key, _, value in pairs}


def select_backends(
    names: Sequence[str], registry: BackendRegistry, *, device: torch.device, required: bool
) -> tuple[list[Candidate], list[CheckResult]]:
    """Load the backends called ``names``, all variants or the labelled one, and say why others cannot be used.

    What does not run on this kind of ``device`` is skipped, and what is not installed is skipped with its install hint.
    With ``required``, for backends that were asked for by name, the latter is an error unless another variant of the
    backend is there. An entry point that fails to load is an error. Raises UnknownBackendError, with the known names,
    for a name that nobody registers.
    """
    usable: list[Candidate] = []
    others: list[CheckResult] = []
    for label in dict.fromkeys(names):
        name, chosen = parse_label(label)
        try:
            backend = registry.load(name)
            found = [
                Candidate(name=name, backend=backend, options=options)
                for options in ([chosen] if chosen else backend.variants())
            ]
            missing = [candidate.selected.unavailable() for candidate in found]
        except UnknownBackendError:
            raise
        except Exception as error:  # noqa: BLE001  # a broken plug-in must not hide the others
            others.append(CheckResult(outcome=Outcome.ERROR, backend=label, detail=describe(error)))
            continue
        outcome = Outcome.ERROR if required and all(missing) else Outcome.SKIPPED
        for candidate, reason in zip(found, missing, strict=True):
            devices = candidate.selected.capabilities.devices
            if device.type not in devices:
                limit = f"devices: runs on {', '.join(sorted(devices))}, not on {device.type}"
                others.append(_result(Outcome.SKIPPED, candidate, limit))
            elif reason is not None:
                others.append(_result(outcome, candidate, reason))
            else:
                usable.append(candidate)
    return usable, others


def _result(outcome: Outcome, candidate: Candidate, reason: str) -> CheckResult:
    return CheckResult(outcome=outcome, backend=candidate.label, detail=reason)
