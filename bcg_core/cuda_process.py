"""What torch and CUDA keep once a process, and what all CUDA engines of the process therefore share.

cuBLAS has a workspace for each stream and each thread that multiplies there, and torch keeps it for good. With streams
of their own, a hundred engines would hold dozens of them, each in the memory pool of whichever engine came first; with
shared streams there is one, in a pool that lives as long as the process. And because captures share the stream, they
take turns.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from threading import RLock

import torch

from bcg_core.empty_graphs import warnings_of_empty_graphs

_turn = RLock()
_broken: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture could not be ended. The allocator of pinned memory keeps a pointer to each for ever, and follows
it at every allocation (torch 2.11), so they must not be freed."""


@contextmanager
def capture_turn() -> Iterator[None]:
    """Wait until no other thread of this process captures, and hold them off while the block runs."""
    with _turn:
        yield


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Own a memory pool of CUDA graphs.

    Attributes:
        handle: what graphs are captured with.
        anchor: an empty graph: torch frees a pool with its last graph, and cannot use the handle again.
    """

    handle: torch.cuda._POOL_HANDLE
    anchor: torch.cuda.CUDAGraph

    @classmethod
    def open(
        cls, stream: torch.cuda.Stream, handle: torch.cuda._POOL_HANDLE | None = None
    ) -> "Pool":
        """Make a pool, or take part in that of ``handle``, by an empty capture on ``stream``."""
        pool = cls(
            handle=torch.cuda.graph_pool_handle() if handle is None else handle,
            anchor=torch.cuda.CUDAGraph(),
        )
        with capture_turn(), torch.cuda.stream(stream), warnings_of_empty_graphs("ignore"):
            pool.anchor.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            pool.anchor.capture_end()
        return pool


class SharedStreams:
    """Own the streams on which all engines of a device warm up and capture, and the pool of their workspaces.

    Attributes:
        capture: the stream of captures; workspaces on it lie in a pool of their own.
        warm_up: the stream of warm-ups. Not the same: a workspace that a warm-up allocates belongs to nobody, and
            whoever calls ``torch._C._cuda_clearCublasWorkspaces``, as torch's CUDA graph trees do, frees it under
            recorded segments. Memory of the pool is only ever given back to the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.capture = torch.cuda.Stream(device)
        self.warm_up = torch.cuda.Stream(device)
        self._device = device
        self._pool = Pool.open(self.capture)

    def provide_workspace(self, stream: torch.cuda.Stream) -> None:
        """See that this thread's workspace on ``stream`` exists, in the pool, by a capture of one small product.

        Call it in a turn, outside of captures. Nothing is computed.
        """
        with torch.cuda.stream(self.warm_up):
            torch.cuda.current_blas_handle()  # a thread's first one cannot be made in a capture
        product = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            product.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
            try:
                _multiply(self._device)
            finally:
                product.capture_end()


def _multiply(device: torch.device) -> None:
    with torch.inference_mode():
        matrix = torch.empty(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(matrix, matrix)


@cache
def shared_streams(device: torch.device) -> SharedStreams:
    """Return the streams of ``device``, which names its index; made at the first call."""
    return SharedStreams(device)


def give_up(graph: torch.cuda.CUDAGraph, pool: Pool, device: torch.device) -> None:
    """Keep a graph whose capture could not be ended, and leave its pool as far as torch lets.

    After a failing ``capture_end`` torch (seen in 2.11) goes on recording allocations into the pool, counts the graph
    among its users for ever, and takes the random generator for captured. The first two are undone here; the third is
    by the next capture in another pool.
    """
    _broken.append(graph)
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool.handle)
        torch._C._cuda_releasePool(device.index, pool.handle)


def broken_captures() -> int:
    """Return how many captures of this process could not be ended; each keeps a little host memory for good."""
    return len(_broken)
