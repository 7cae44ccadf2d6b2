"""Work that a break leaves on streams of its own."""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_core.debug.record import Site
from bcg_core.debug.syncs import synchronisation
from bcg_core.debug.tool import Tool
from bcg_core.errors import StreamError
from bcg_core.modes import OwnMode

_DELAY_CYCLES = 40_000_000
"""How long a side stream is held up: some 20 ms, far longer than a host needs to look."""
_GRACE_SECONDS = 0.002
"""How long an event right behind joined work may take to be seen as done."""


class StreamGuard(Tool):
    """Refuse a break that leaves another stream current, or work on another stream that nobody waits for.

    A side stream is held up before the first operation that a break queues on it. If it is still at work when the
    current stream has run dry, nobody ordered the one after the other, and the next segment races it. Synchronises
    after each break that used another stream. Work that a vendor's extension queues below the dispatcher is not seen;
    on a CPU there are no streams.
    """

    def around_break(
        self, device: torch.device, site: Site, call: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Compare streams before and after ``call``."""
        if device.type != "cuda":
            return call

        def watched() -> Any:
            before = torch.cuda.current_stream(device)
            with _SideStreams(before) as side:
                result = call()
            after = torch.cuda.current_stream(device)
            if after != before:
                torch.cuda.set_stream(before)
                raise StreamError(
                    f"{site} left {after} current, where {before} was: segments would run on either. Switch streams in "
                    "a with block, which switches back"
                )
            unjoined = side.unjoined()
            if unjoined is not None:
                raise StreamError(
                    f"{site} queued {unjoined} on another stream and did not wait for it: the next segment races it. "
                    "End the break with torch.cuda.current_stream().wait_stream(side)"
                )
            return result

        return watched


class _SideStreams(OwnMode, TorchDispatchMode):
    """Note the streams other than ``main`` that operations are queued on, and hold each up once."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
        self._main = main
        self._used: dict[torch.cuda.Stream, str] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run as they are."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the current stream, and run ``func``."""
        stream = torch.cuda.current_stream(self._main.device)
        if stream != self._main and stream not in self._used:
            self._used[stream] = func.name()
            torch.cuda._sleep(_DELAY_CYCLES)
        return func(*args, **(kwargs or {}))

    def unjoined(self) -> str | None:
        """Return the first operation on a stream that is at work although the main one has run dry; None if none is."""
        ends = [(name, stream.record_event()) for stream, name in self._used.items()]
        if not ends:
            return None
        with synchronisation("default"):
            self._main.synchronize()
        deadline = perf_counter() + _GRACE_SECONDS
        while perf_counter() < deadline:
            if all(event.query() for _, event in ends):
                return None
        return next((name for name, event in ends if not event.query()), None)
