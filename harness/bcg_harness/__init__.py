"""Prove attention backends right under breakable prefill graphs: cases, references, checks, and the ``bcg`` command.

Names are imported at first use, because pytest imports this package in every project of its environment.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from bcg_harness.budgets import Comparison, Errors, bit_equal, compare
    from bcg_harness.builtin import builtin_cases
    from bcg_harness.candidates import Candidate, select_backends
    from bcg_harness.cases import Case, Step, read_cases
    from bcg_harness.checks import CHECK_NAMES
    from bcg_harness.environment import Environment
    from bcg_harness.errors import CaseError, HarnessError
    from bcg_harness.matrix import Matrix
    from bcg_harness.models import ResolvedModel, resolve_model
    from bcg_harness.outcome import CheckResult, Outcome, is_green, tally
    from bcg_harness.progress import NoProgress, Progress
    from bcg_harness.reference import LlamaReference
    from bcg_harness.report import CheckReport
    from bcg_harness.tokens import RandomTokens, TextTokens, TokenSource

__all__ = [
    "CHECK_NAMES",
    "Candidate",
    "Case",
    "CaseError",
    "CheckReport",
    "CheckResult",
    "Comparison",
    "Environment",
    "Errors",
    "HarnessError",
    "LlamaReference",
    "Matrix",
    "NoProgress",
    "Outcome",
    "Progress",
    "RandomTokens",
    "ResolvedModel",
    "Step",
    "TextTokens",
    "TokenSource",
    "bit_equal",
    "builtin_cases",
    "compare",
    "is_green",
    "read_cases",
    "resolve_model",
    "select_backends",
    "tally",
]

_MODULES = {
    "budgets": ("Comparison", "Errors", "bit_equal", "compare"),
    "builtin": ("builtin_cases",),
    "candidates": ("Candidate", "select_backends"),
    "cases": ("Case", "Step", "read_cases"),
    "checks": ("CHECK_NAMES",),
    "environment": ("Environment",),
    "errors": ("CaseError", "HarnessError"),
    "matrix": ("Matrix",),
    "models": ("ResolvedModel", "resolve_model"),
    "outcome": ("CheckResult", "Outcome", "is_green", "tally"),
    "progress": ("NoProgress", "Progress"),
    "reference": ("LlamaReference",),
    "report": ("CheckReport",),
    "tokens": ("RandomTokens", "TextTokens", "TokenSource"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import ``name`` from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
