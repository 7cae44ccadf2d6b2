"""Segments as real CUDA graphs."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from bcg_core.capture_advice import advise
from bcg_core.cuda_process import Pool, capture_turn, give_up, shared_streams
from bcg_core.empty_graphs import warnings_of_empty_graphs
from bcg_core.engine import Segment, SegmentEngine, refuse_inside_capture
from bcg_core.errors import NestedCaptureError
from bcg_core.garbage import no_garbage_collection
from bcg_core.notes import add_note

ErrorMode = Literal["thread_local", "global", "relaxed"]


class CUDASegmentEngine(SegmentEngine):
    """Record segments as ``torch.cuda.CUDAGraph`` objects that share one memory pool.

    Because segments of all graphs share the pool, and replays do not overlap, memory is that of the largest graph, not
    the sum. Captures of all engines of a device share one stream, and those of different threads wait for each other.
    Garbage collection is held off during capture: a collected CUDA object would end it.

    Args:
        device: a CUDA device; without an index, the current one.
        pool: the memory pool to capture into, to share it with other graphs (``torch.cuda.graph_pool_handle()`` or
            ``graph.pool()``): they must not be replayed while one of this engine's is, and memory is used again by
            captures on the same stream alone. Default is a new one, as it is for all captures after one that broke.
        stream: what to capture on. Default is one that all engines of the device share.
        capture_error_mode: which threads' CUDA calls a capture forbids, as in ``CUDAGraph.capture_begin``. The default
            lets other threads of a server go on; with "global", any allocation of theirs ends the capture.
        generators: random generators besides the default one that segments draw from.

    Raises ValueError where torch sees no GPU or for a stream of another device, NestedCaptureError inside a capture.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        pool: "torch.cuda._POOL_HANDLE | None" = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: ErrorMode = "thread_local",
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "device 'cuda' asked for, but torch sees no GPU: install a CUDA build of torch and a driver, "
                "or use device 'cpu' for the emulator"
            )
        refuse_inside_capture()
        _refuse_on_capturing_stream("an engine cannot be made")
        device = torch.device(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._shared = shared_streams(self._device)
        if stream is not None and stream.device != self._device:
            raise ValueError(f"the stream is one of {stream.device}, the engine of {self._device}")
        self._stream = stream or self._shared.capture
        self._error_mode = capture_error_mode
        self._generators = tuple(generators)
        self._pools = [Pool.open(self._stream, pool)]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._growth = 0

    @property
    def device(self) -> torch.device:
        """Return the CUDA device, with its index."""
        return self._device

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Switch to the stream of warm-ups, ordered after and before the caller's; synchronises at the end."""
        stream, caller = self._shared.warm_up, torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            caller.wait_stream(stream)
        stream.synchronize()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Wait for other threads' captures, synchronise, switch to the capture stream and so to its device.

        Holds garbage collection off. The caller's stream is ordered after it: breaks ran there. What CUDA raises inside
        gets a note of what to do about it. Raises NestedCaptureError where somebody else's capture is under way.
        """
        _refuse_on_capturing_stream("a capture cannot be started")
        with capture_turn():
            caller = torch.cuda.current_stream(self._device)
            torch.cuda.synchronize(self._device)
            self._shared.provide_workspace(self._stream)
            before = torch.cuda.memory_reserved(self._device)
            try:
                with no_garbage_collection(), torch.cuda.stream(self._stream):
                    yield
            except BaseException as error:
                if (advice := advise(error, self._stream)) is not None:
                    add_note(error, advice)
                raise
            finally:
                self._growth += torch.cuda.memory_reserved(self._device) - before
                caller.wait_stream(self._stream)

    def begin(self) -> None:
        """Start capturing the capture stream into a new CUDA graph."""
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            self._graph.register_generator_state(generator)
        self._graph.capture_begin(pool=self._pools[-1].handle, capture_error_mode=self._error_mode)

    def end(self) -> Segment:
        """Finish the CUDA graph; a segment without work is kept, and costs nothing to replay."""
        graph = self._graph
        assert graph is not None, "end() without begin()"
        segment: Segment = graph
        with warnings_of_empty_graphs("error"):
            try:
                graph.capture_end()
            except UserWarning:
                segment = EmptySegment()
        self._graph = None
        return segment

    def abort(self) -> None:
        """End an unfinished capture, whatever state it is in.

        An illegal call in a segment makes ``capture_end`` fail, after which torch cannot use the pool again. So it is
        retired: later captures use a new one, whose first capture also resets the random generator.
        """
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            with warnings_of_empty_graphs("ignore"):
                graph.capture_end()
        except RuntimeError:
            give_up(graph, self._pools[-1], self._device)
            self._pools.append(Pool.open(self._stream))

    def holds(self, addresses: Collection[int]) -> set[int]:
        """Return which of these addresses lie in the pools that all segments share; for debugging, and seldom.

        Not for every capture: a process that took snapshots of some hundred pools, one after the other, died of damaged
        memory (torch 2.11, five times of five, and not without them).
        """
        blocks: list[Any] = [
            block for pool in self._pools for block in torch.cuda.memory_snapshot(pool.handle)
        ]
        spans = [(block["address"], block["total_size"]) for block in blocks]
        return {
            address
            for address in addresses
            if any(start <= address < start + size for start, size in spans)
        }

    def memory_bytes(self) -> int:
        """Return by how much captures have made the device's reserved memory grow.

        That is what the pools that all segments share have taken, for as long as the engine lives; cuBLAS workspaces
        are not among it. Not read from the pools: see ``holds``.
        """
        return self._growth


class EmptySegment:
    """Stand for a segment in which no device work was recorded."""

    def replay(self) -> None:
        """Do nothing."""


def _refuse_on_capturing_stream(what: str) -> None:
    """Refuse ``what`` while the current stream captures, into whosever graph."""
    if torch.cuda.is_current_stream_capturing():
        raise NestedCaptureError(
            f"{what} inside a capture: do it before, or after the capture has ended"
        )
