"""All classes of faults, and their table for the docs."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from bcg_harness.faults.ambient import AMBIENT
from bcg_harness.faults.breaks import BREAKS
from bcg_harness.faults.capture import CAPTURE
from bcg_harness.faults.checkpoints import CHECKPOINTS
from bcg_harness.faults.emulator import EMULATOR
from bcg_harness.faults.engines import ENGINES
from bcg_harness.faults.libraries import LIBRARIES
from bcg_harness.faults.lifetimes import LIFETIMES
from bcg_harness.faults.live_state import LIVE_STATE
from bcg_harness.faults.padding import PADDING
from bcg_harness.faults.pages import PAGES
from bcg_harness.faults.record import Caught, Fault
from bcg_harness.faults.registration import REGISTRATION
from bcg_harness.faults.serving import SERVING
from bcg_harness.faults.turns import TURNS

GROUPS: Mapping[str, tuple[Fault, ...]] = MappingProxyType(
    {
        "Lifetime of memory across a break": LIFETIMES,
        "Padding": PADDING,
        "Metadata and live state": LIVE_STATE,
        "Capture, errors, dispatch": CAPTURE,
        "Libraries": LIBRARIES,
        "Registration": REGISTRATION,
        "Calls, threads, backends": TURNS,
        "Pages": PAGES,
        "What crosses a break": BREAKS,
        "The caller's torch": AMBIENT,
        "Checkpoints": CHECKPOINTS,
        "The emulator": EMULATOR,
        "Engines": ENGINES,
        "Serving": SERVING,
    }
)
"""The classes under the headings of the table."""

FAULTS: tuple[Fault, ...] = tuple(fault for group in GROUPS.values() for fault in group)
"""All classes, in order."""

_KINDS = {
    Caught.CHECK: "a check of the matrix finds it, so `bcg check` fails",
    Caught.ERROR: "the attempt is refused with an error, or counted with its reason",
    Caught.DESIGN: "nothing that a caller can do leads there",
}

_INTRODUCTION = (
    "What goes wrong in systems that capture prefill in segments, and in the attention libraries they call, as their",
    "public issue trackers tell. Each class is found, refused, or cannot happen here. For each there are tests of the",
    "guard; most have a model, backend or runner with this very fault, from `bcg_harness.testing`. Some need a GPU or",
    "two. No check has a condition that could be left out: for each, `tests/harness/test_faults.py` has a fault that",
    "its check does not find without it. Made by `python -m bcg_harness.faults > docs/faults.md`.",
)


def render() -> str:
    """Return ``docs/faults.md``: a table of all classes, and the tests that prove each."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Known faults"
    yield ""
    yield from _INTRODUCTION
    yield ""
    yield "| caught by | means | classes |"
    yield "| --- | --- | ---: |"
    for kind, meaning in _KINDS.items():
        yield f"| {kind.value} | {meaning} | {sum(fault.caught is kind for fault in FAULTS)} |"
    for heading, faults in GROUPS.items():
        yield from ("", f"## {heading}", "")
        yield "| | what goes wrong | caught by | how |"
        yield "| ---: | --- | --- | --- |"
        for fault in faults:
            yield f"| {fault.number} | {fault.title} | {fault.caught.value}: {fault.by} | {fault.how} |"
    yield from ("", "## Proofs", "")
    for fault in FAULTS:
        yield f"{fault.number}. {fault.title}"
        for proof in fault.proofs:
            yield f"    - `{proof}`"
