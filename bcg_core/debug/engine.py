"""An engine that watches what another one records and replays."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from bcg_core.debug.hidden_outputs import HiddenOutputDetector
from bcg_core.debug.observer import Observer
from bcg_core.debug.pointers import PointerGuard
from bcg_core.debug.record import CaptureRecord, Site, tensors_in
from bcg_core.debug.streams import StreamGuard
from bcg_core.debug.tool import Tool
from bcg_core.engine import Segment, SegmentEngine


class WatchedEngine(SegmentEngine):
    """Let ``engine`` record and replay, and debug tools watch; graphs made with it are watched for life.

    Args:
        engine: does the work.
        tools: what to watch for; default is all that needs no runner: PointerGuard, HiddenOutputDetector, StreamGuard.
    """

    def __init__(self, engine: SegmentEngine, tools: Sequence[Tool] | None = None) -> None:
        self._inner = engine
        self._tools: tuple[Tool, ...] = (
            (PointerGuard(), HiddenOutputDetector(), StreamGuard()) if tools is None else (*tools,)
        )
        self._record = CaptureRecord()

    @property
    def busy(self) -> str | None:
        """Return what uses the memory of the engine that works, whichever engine it was begun with."""
        return self._inner.busy

    @busy.setter
    def busy(self, use: str | None) -> None:
        self._inner.busy = use

    @property
    def device(self) -> torch.device:
        """Return the device of the engine that works."""
        return self._inner.device

    def warming_up(self) -> AbstractContextManager[None]:
        """Delegate."""
        return self._inner.warming_up()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Delegate, and observe; once all went well, have every tool say what to check before replays."""
        self._record = record = CaptureRecord()
        try:
            with self._inner.capturing(), Observer(record, self._tools, self.device):
                yield
        finally:
            # What a record holds lives as long as its graph.
            self._record = CaptureRecord()
        own = self._inner.holds({access.base for access in record.accesses.values()})
        record.accesses = {
            memory: access for memory, access in record.accesses.items() if access.base not in own
        }
        checks = [tool.captured(record) for tool in self._tools]
        record.checks = tuple(check for check in checks if check is not None)
        record.finished = True

    def begin(self) -> None:
        """Delegate."""
        self._inner.begin()
        self._record.segments += 1
        self._record.in_segment = True

    def end(self) -> Segment:
        """Delegate; raises what a tool refused the segment for, if the model swallowed that."""
        record = self._record
        record.in_segment = False
        segment = self._inner.end()
        if record.failure is not None:
            raise record.failure
        return FirstSegment(segment, record) if record.segments == 1 else segment

    def abort(self) -> None:
        """Delegate."""
        self._record.in_segment = False
        self._inner.abort()

    def around_break(self, index: int, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        """Note what the break takes, makes and returns at capture, and let the tools wrap it."""
        site = Site(index=index, name=name)
        record = self._record
        given = (call.args, call.keywords) if isinstance(call, partial) else ()
        for tensor in tensors_in(given):
            for tool in self._tools:
                tool.touches(record, tensor, f"an argument of {site}")
        record.take(site, given)
        for tool in self._tools:
            call = tool.around_break(self.device, site, call)
        return WatchedBreak(record, site, self._inner.around_break(index, name, call))

    def holds(self, addresses: Collection[int]) -> set[int]:
        """Delegate."""
        return self._inner.holds(addresses)

    def memory_bytes(self) -> int:
        """Delegate."""
        return self._inner.memory_bytes()


class FirstSegment:
    """Make the checks that precede a replay, then replay the segment that it begins with."""

    def __init__(self, segment: Segment, record: CaptureRecord) -> None:
        self._segment = segment
        self._record = record

    def replay(self) -> None:
        """Check, and replay; raises what a tool finds, before anything is launched."""
        for check in self._record.checks:
            check()
        self._segment.replay()


class WatchedBreak:
    """Call a break; at capture, note what it makes and returns."""

    def __init__(self, record: CaptureRecord, site: Site, call: Callable[[], Any]) -> None:
        self._record = record
        self._site = site
        self._call = call

    def __call__(self) -> Any:
        """Call it, and return its result."""
        record = self._record
        if record.finished:
            return self._call()
        record.site = self._site
        try:
            result = self._call()
        finally:
            record.site = None
        record.give(self._site, result)
        return result
