"""Segments as real CUDA graphs."""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bcg_core.engine import Segment, SegmentEngine
from bcg_core.garbage import no_garbage_collection


class CUDASegmentEngine(SegmentEngine):
    """Record segments as ``torch.cuda.CUDAGraph`` objects that share one memory pool and one stream.

    Because segments of all graphs share the pool, and replays do not overlap, memory is that of the largest graph, not
    the sum. Garbage collection is held off during capture: a collected CUDA object would end it.

    Args:
        device: a CUDA device; without an index, the current one.

    Raises ValueError where torch sees no GPU.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "device 'cuda' asked for, but torch sees no GPU: install a CUDA build of torch and a driver, "
                "or use device 'cpu' for the emulator"
            )
        device = torch.device(device)
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._warm_up_stream = torch.cuda.Stream(self._device)
        self._pools: list[_Pool] = [self._open_pool()]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []

    def _open_pool(self) -> "_Pool":
        """Make a memory pool, kept alive by an empty graph: torch frees a pool with its last graph, for good."""
        pool = _Pool(handle=torch.cuda.graph_pool_handle(), anchor=torch.cuda.CUDAGraph())
        with torch.cuda.stream(self._stream), _empty_graphs("ignore"):
            pool.anchor.capture_begin(pool=pool.handle)
            pool.anchor.capture_end()
        return pool

    @property
    def device(self) -> torch.device:
        """Return the CUDA device, with its index."""
        return self._device

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Switch to a stream of its own, ordered after and before the caller's; synchronises at the end.

        Not to the capture stream: cuBLAS has a workspace for each stream, and the one that captures use has to be
        allocated inside them, from the pool. One from a warm-up belongs to nobody, and whoever calls
        ``torch._C._cuda_clearCublasWorkspaces``, as torch's own CUDA graph trees do, frees it under recorded segments.
        """
        caller = torch.cuda.current_stream(self._device)
        self._warm_up_stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._warm_up_stream):
                yield
        finally:
            caller.wait_stream(self._warm_up_stream)
        self._warm_up_stream.synchronize()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Synchronise, switch to the capture stream, and so to its device, and hold garbage collection off.

        The caller's stream is ordered after it: breaks ran there.
        """
        caller = torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        try:
            with no_garbage_collection(), torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)

    def begin(self) -> None:
        """Start capturing the capture stream into a new CUDA graph."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pools[-1].handle)

    def end(self) -> Segment:
        """Finish the CUDA graph; a segment without work is kept, and costs nothing to replay."""
        graph = self._graph
        assert graph is not None, "end() without begin()"
        segment: Segment = graph
        with _empty_graphs("error"):
            try:
                graph.capture_end()
            except UserWarning:
                segment = EmptySegment()
        self._graph = None
        return segment

    def abort(self) -> None:
        """End an unfinished capture, whatever state it is in.

        An illegal call in a segment makes ``capture_end`` fail, and torch (seen in 2.11) then leaves three things
        behind: both allocators still record into the pool, and the random generator believes it is captured. Only the
        first allocator can be told to stop, so the pool is retired: later captures use a new one, whose first capture
        also resets the generator. The broken graph stays referenced, as the allocator's filter points at it.
        """
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            with _empty_graphs("ignore"):
                graph.capture_end()
        except RuntimeError:
            self._broken.append(graph)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pools[-1].handle)
            self._pools.append(self._open_pool())

    def holds(self, addresses: Collection[int]) -> set[int]:
        """Return which of these addresses lie in the pools that all segments share."""
        spans = [(block["address"], block["total_size"]) for block in self._blocks()]
        return {
            address
            for address in addresses
            if any(start <= address < start + size for start, size in spans)
        }

    def memory_bytes(self) -> int:
        """Return the bytes reserved by the pools that all segments share."""
        return sum(int(block["total_size"]) for block in self._blocks())

    def _blocks(self) -> list[Any]:
        return [block for pool in self._pools for block in torch.cuda.memory_snapshot(pool.handle)]


@dataclass(frozen=True, kw_only=True)
class _Pool:
    handle: torch.cuda._POOL_HANDLE
    anchor: torch.cuda.CUDAGraph


class EmptySegment:
    """Stand for a segment in which no device work was recorded."""

    def replay(self) -> None:
        """Do nothing."""


@contextmanager
def _empty_graphs(action: Literal["ignore", "error"]) -> Iterator[None]:
    """Handle torch's warning that a CUDA graph is empty, which is how it tells that it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings(action, message="The CUDA Graph is empty")
        yield
