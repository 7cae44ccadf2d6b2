"""Helpers for tests: a correct plain-torch backend, and models, backends, runners and an engine with one fault each."""

from bcg_harness.testing.faulty_backends import (
    AlignsTopLeft,
    AssumesContiguousPages,
    ChangesQueries,
    FreezesMetadata,
    HonestlyNoisy,
    IgnoresLengths,
    IgnoresPrefix,
    KeepsStaleRows,
    Noisy,
    Raises,
    TrustsUnwrittenSlots,
    WritesCache,
    WritesRowR,
)
from bcg_harness.testing.faulty_models import AttendsInSegment, KeepsPythonState, SkipsBreak
from bcg_harness.testing.faulty_runners import (
    FallsBackSilently,
    ForgetsPaddedInputs,
    ForgetsPaddedOutput,
    FreezesSlots,
    PretendsToReplay,
    RerunningEngine,
    RunsPythonAgain,
    SamplesWrongRow,
)
from bcg_harness.testing.limited_backends import NoFloat32, NoPrefix, NotInstalled, Variants
from bcg_harness.testing.mask_backend import MaskBackend

__all__ = [
    "AlignsTopLeft",
    "AssumesContiguousPages",
    "AttendsInSegment",
    "ChangesQueries",
    "FallsBackSilently",
    "ForgetsPaddedInputs",
    "ForgetsPaddedOutput",
    "FreezesMetadata",
    "FreezesSlots",
    "HonestlyNoisy",
    "IgnoresLengths",
    "IgnoresPrefix",
    "KeepsPythonState",
    "KeepsStaleRows",
    "MaskBackend",
    "NoFloat32",
    "NoPrefix",
    "Noisy",
    "NotInstalled",
    "PretendsToReplay",
    "Raises",
    "RerunningEngine",
    "RunsPythonAgain",
    "SamplesWrongRow",
    "SkipsBreak",
    "TrustsUnwrittenSlots",
    "Variants",
    "WritesCache",
    "WritesRowR",
]
