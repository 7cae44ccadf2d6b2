"""What a debug tool may hear of, and take part in."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bcg_core.debug.record import CaptureRecord, Site

if TYPE_CHECKING:
    from bcg_core.batch import PrefillBatch
    from bcg_core.runner import PrefillRunner


class Tool:
    """Watch captures and replays for one kind of fault; a subclass overrides what it needs.

    Whatever a tool finds it raises as a subclass of ``DebugError``. One tool serves one engine or one runner.
    """

    def attach(self, runner: "PrefillRunner") -> None:
        """Learn which runner is watched; not called where a bare graph is."""

    def touches(self, record: CaptureRecord, tensor: Tensor, where: str) -> None:
        """Judge that a segment reads or writes ``tensor``, or that a break is called with it; called at capture."""

    def captured(self, record: CaptureRecord) -> Callable[[], None] | None:
        """Return what to call before each replay of a finished capture, if anything."""
        return None

    def around_break(
        self, device: torch.device, site: Site, call: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return what is called in place of ``call``, at capture and at every replay."""
        return call

    def around_replay(
        self, runner: "PrefillRunner", batch: "PrefillBatch", padded: int
    ) -> AbstractContextManager[None]:
        """Return what is entered before a runner replays ``batch`` in a bucket of ``padded`` tokens, and left after."""
        return nullcontext()
