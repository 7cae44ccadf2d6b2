"""What records and replays the segments between breaks."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from bcg_core.breaks import active_recorder
from bcg_core.errors import NestedCaptureError


class Segment(Protocol):
    """A recorded stretch of device work with fixed addresses."""

    def replay(self) -> None:
        """Do the recorded work again on the current stream, reading and writing the recorded addresses."""


class SegmentEngine(Protocol):
    """Record what happens between ``begin`` and ``end``, one segment at a time.

    Engines hold what all captures share: the memory pool and the capture stream. Use one engine for all graphs of a
    runner, capture from the largest bucket to the smallest, and replay one graph at a time.

    Attributes:
        busy: the capture or replay that uses the engine's memory right now, in words; None while none does.
    """

    busy: str | None = None

    @property
    def device(self) -> torch.device:
        """Return the device whose work is recorded."""

    def capturing(self) -> AbstractContextManager[None]:
        """Prepare for a series of segments, and restore everything afterwards, also after an error."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Run eager work ahead of captures, so that kernels are compiled and handles exist by then."""

    def begin(self) -> None:
        """Start a segment. Device work from here to ``end`` is recorded, not done."""

    def end(self) -> Segment:
        """Finish the segment and return it; raises what made the recording invalid."""

    def abort(self) -> None:
        """Drop the segment at hand, if any, and leave the recording state."""

    def around_break(self, index: int, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return what is called in place of break ``index``, at its capture and at every replay.

        Called once for each break of a capture, between two segments. Here that is ``call`` itself; an engine that
        watches breaks wraps it.
        """
        return call

    def holds(self, addresses: Collection[int]) -> set[int]:
        """Return which of these addresses lie in memory of recorded segments; for debugging, not for replays."""

    def memory_bytes(self) -> int:
        """Return the device bytes that recorded segments hold."""


def refuse_inside_capture() -> None:
    """Raise NestedCaptureError inside a capture; for whatever makes an engine.

    On a GPU an engine makes an empty capture of its own, which a stream that is being captured does not allow.
    """
    if active_recorder.get() is not None:
        raise NestedCaptureError(
            "an engine cannot be made inside a capture, be it in a segment or in a break: make it before"
        )


def engine_for(device: torch.device | str) -> SegmentEngine:
    """Return a new engine for ``device``: CUDA graphs on ``cuda``, the emulator on ``cpu``.

    Raises ValueError for any other device type, and for ``cuda`` where torch sees no GPU; NestedCaptureError inside a
    capture.
    """
    refuse_inside_capture()
    device = torch.device(device)
    if device.type == "cpu":
        from bcg_core.cpu_engine import CPUSegmentEngine

        return CPUSegmentEngine()
    if device.type == "cuda":
        from bcg_core.cuda_engine import CUDASegmentEngine

        return CUDASegmentEngine(device)
    raise ValueError(f"no segment engine for device {str(device)!r}; use 'cuda' or 'cpu'")
