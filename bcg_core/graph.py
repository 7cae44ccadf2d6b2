"""A graph that is broken by Python: recorded segments with recorded calls between them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from bcg_core.ambient import Ambient, neutral, without_autocast_cache
from bcg_core.arguments import frozen_call
from bcg_core.breaks import BreakRecorder, active_recorder, is_capturing
from bcg_core.compilation import refuse_compilation, uncompiled, untraced
from bcg_core.current_device import on_device
from bcg_core.engine import Segment, SegmentEngine, engine_for
from bcg_core.errors import CaptureError, NestedCaptureError
from bcg_core.modes import refuse_modes
from bcg_core.notes import add_note, noting
from bcg_core.outputs import FrozenOutput


class RecordedBreak:
    """Call a function again with the arguments of its capture, and put its result where it was then.

    Holds arguments and result strongly: their memory lives as long as the graph.
    """

    def __init__(self, index: int, name: str, call: Callable[[], Any], result: Any) -> None:
        self.index = index
        self.name = name
        self._call = call
        self._output = FrozenOutput(name, result)

    def replay(self) -> None:
        """Run the break; an exception reaches the caller as raised, with a note that names the break."""
        try:
            result = self._call()
        except BaseException as error:
            add_note(error, f"raised at replay in break {self.index} ({self.name})")
            raise
        self._output.accept(result)


class BreakableCUDAGraph:
    """Hold segments and breaks in the order of their capture, and replay them.

    Fill it with ``BreakableCUDAGraphCapture``. Replays run on the caller's current stream of the engine's device, which
    is the current device of every break, as at capture. They do not synchronise, and must not overlap with replays of
    another graph of the same engine, as both use the engine's memory pool. In a break another graph may be replayed, if
    it has an engine of its own.

    Args:
        engine: what records the segments; default is one made when it is first needed, for the current CUDA device, or
            for the CPU where torch sees no GPU.

    Attributes:
        segments: recorded segments; one more than breaks once captured.
        breaks: recorded breaks.
    """

    def __init__(self, engine: SegmentEngine | None = None) -> None:
        self._engine = engine
        self.segments: tuple[Segment, ...] = ()
        self.breaks: tuple[RecordedBreak, ...] = ()
        self._steps: tuple[Callable[[], None], ...] = ()

    @property
    def engine(self) -> SegmentEngine:
        """Return what records the segments; makes it at the first call, unless one was given."""
        if self._engine is None:
            self._engine = engine_for("cuda" if torch.cuda.is_available() else "cpu")
        return self._engine

    @property
    def captured(self) -> bool:
        """Tell whether a capture has been published here."""
        return bool(self.segments)

    def publish(self, segments: list[Segment], breaks: list[RecordedBreak]) -> None:
        """Take a finished capture; called by the capture, once and only when all of it went well."""
        self.segments, self.breaks = tuple(segments), tuple(breaks)
        steps = [segments[0].replay]
        for recorded, segment in zip(breaks, segments[1:], strict=True):
            steps += [recorded.replay, segment.replay]
        self._steps = tuple(steps)

    @uncompiled
    def replay(self) -> None:
        """Run all segments and breaks in order, while the engine's device is the current one.

        Raises CaptureError before anything was captured, NestedCaptureError inside a capture, and whatever a break
        raises; after that the graph can be replayed again.
        """
        with on_device(self.engine.device), neutral("BreakableCUDAGraph.replay"):
            self.replay_here()

    def replay_here(self) -> None:
        """Do what ``replay`` does where the engine's device is the current one already, as it is in a prefill."""
        if not self._steps:
            raise CaptureError("nothing to replay: capture into this graph first")
        if is_capturing():
            raise NestedCaptureError(
                "a graph cannot be replayed inside a segment of a capture: replay it in a break, eager_on_graph(replay)"
            )
        engine = self.engine
        if engine.busy is not None:
            raise NestedCaptureError(
                f"a graph cannot be replayed during {engine.busy} of the same engine, whose memory it uses, too: "
                "capture it with an engine of its own"
            )
        engine.busy = "a replay"
        try:
            for step in self._steps:
                step()
        finally:
            engine.busy = None

    def reset(self) -> None:
        """Drop everything recorded, so that memory is freed and the graph can be captured anew."""
        self.segments, self.breaks, self._steps = (), (), ()


class BreakableCUDAGraphCapture(BreakRecorder):
    """Record the device work of a ``with`` block into a graph, split at its breaks.

    Transactional: the graph is filled only when the whole block went well. An exception reaches the caller as it was
    raised, the stream stops capturing, and the graph and its engine are as they were before.

    Args:
        graph: what to fill.
        inline_breaks: run the functions of breaks as part of the segment, so that their device work is recorded too:
            one segment, no breaks, and none of their Python at replay.

    Raises NestedCaptureError inside another capture and CaptureError for a graph that is filled already.
    """

    def __init__(self, graph: BreakableCUDAGraph, *, inline_breaks: bool = False) -> None:
        self.graph = graph
        self._inline_breaks = inline_breaks
        self._engine = graph.engine
        self._segments: list[Segment] = []
        self._breaks: list[RecordedBreak] = []
        self._in_break = False
        self._failure: BaseException | None = None
        self._stack = ExitStack()

    @property
    def in_break(self) -> bool:
        """Tell whether a break runs right now, so that nothing is recorded."""
        return self._in_break

    @untraced
    def __enter__(self) -> BreakableCUDAGraph:
        """Begin the first segment."""
        if active_recorder.get() is not None:
            raise NestedCaptureError(
                "a capture cannot be started inside a capture: finish the outer one first"
            )
        refuse_compilation("a capture")
        refuse_modes("a capture")
        if self.graph.captured:
            raise CaptureError("this graph is captured already: call reset() first")
        with ExitStack() as stack:
            stack.enter_context(self._engine.capturing())
            stack.enter_context(without_autocast_cache())
            stack.callback(self._leave, self._engine.busy)
            active_recorder.set(self)
            self._engine.busy = "a capture"
            stack.callback(self._engine.abort)
            self._engine.begin()
            self._stack = stack.pop_all()
        return self.graph

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the last segment and fill the graph, or leave everything as it was."""
        segments, breaks, failure = self._segments, self._breaks, self._failure
        # Whatever happens, nothing half-built stays here.
        self._segments, self._breaks, self._failure = [], [], None
        if exc is not None:
            self._stack.__exit__(exc_type, exc, traceback)
            return
        with self._stack:
            if failure is not None:
                raise CaptureError(
                    "the capture failed at a break or before it, and the code being captured swallowed the exception"
                ) from failure
            with noting(f"raised at capture in segment {len(segments)}"):
                segments.append(self._engine.end())
        self.graph.publish(segments, breaks)

    def _leave(self, busy: str | None) -> None:
        active_recorder.set(None)
        self._engine.busy = busy

    def record_break(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """End the segment, run ``fn`` once, record it with its arguments, begin the next segment.

        With ``inline_breaks`` only run ``fn``.
        """
        if self._in_break:
            return fn(*args, **kwargs)
        if self._failure is not None:
            raise CaptureError("the capture has failed already") from self._failure
        if self._inline_breaks:
            with self._blaming(f"segment 0, in what would be a break ({name})"):
                return fn(*args, **kwargs)
        index = len(self._breaks)
        with self._blaming(f"segment {index}"):
            self._segments.append(self._engine.end())
        self._in_break = True
        try:
            with self._blaming(f"break {index} ({name})"):
                call = self._engine.around_break(index, name, frozen_call(fn, args, kwargs))
                call = Ambient.now().around(call)
                recorded = RecordedBreak(index, name, call, result := call())
        finally:
            self._in_break = False
        self._breaks.append(recorded)
        with self._blaming(f"segment {index + 1}"):
            self._engine.begin()
        return result

    @contextmanager
    def _blaming(self, place: str) -> Iterator[None]:
        """Let the capture fail with whatever is raised inside, and note on it where that was."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            add_note(error, f"raised at capture in {place}")
            raise
