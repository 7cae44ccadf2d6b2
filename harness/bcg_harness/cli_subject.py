"""What a command runs on: device, type, backends, model and tokens, chosen by the options that commands share."""

from dataclasses import dataclass

import torch

from bcg_core import BackendRegistry
from bcg_harness.candidates import Candidate, select_backends
from bcg_harness.cli_progress import loading
from bcg_harness.models import ResolvedModel, resolve_model
from bcg_harness.outcome import CheckResult
from bcg_harness.progress import Progress
from bcg_harness.selection import parse_device, parse_dtype
from bcg_harness.tokens import TokenSource


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """Hold what a command runs on.

    Attributes:
        dtype: of weights and activations.
        candidates: the backends that can be tried.
        others: why other backends cannot.
        resolved: the model.
        source: gives the token ids.
    """

    dtype: torch.dtype
    candidates: list[Candidate]
    others: list[CheckResult]
    resolved: ResolvedModel
    source: TokenSource

    @classmethod
    def choose(
        cls,
        *,
        backends: tuple[str, ...],
        device: str,
        dtype: str | None,
        model: str,
        seed: int,
        progress: Progress,
    ) -> "Subject":
        """Read the options of these names, and load the model last; raises a BcgError for what they ask wrongly."""
        where = parse_device(device)
        if where.type == "cuda" and where.index is not None:
            torch.cuda.set_device(where)
        kind = parse_dtype(dtype, where)
        registry = BackendRegistry()
        candidates, others = select_backends(
            backends or registry.names(), registry, device=where, required=bool(backends)
        )
        resolved = resolve_model(
            model, dtype=kind, device=where, seed=seed, progress=loading(progress)
        )
        return cls(
            dtype=kind,
            candidates=candidates,
            others=others,
            resolved=resolved,
            source=resolved.token_source(None, seed=seed),
        )
