"""Breakable prefill with another package's capture: the same model, buffers, buckets and attention."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from bcg_core import ForwardContext, PagedKVCache
from bcg_core.context import attention
from bcg_harness.bench.mechanism import (
    Mechanism,
    MechanismMode,
    MechanismRunner,
    Recording,
    pool_bytes,
)

_PACKAGE = "breakable_cuda_graphs"


class BreakableMeta(MechanismMode):
    """Replay segments that Meta's package ``breakable-cuda-graphs`` captured; its breaks call the same attention."""

    name = "breakable_meta"
    summary = "breakable, captured by the PyPI package breakable-cuda-graphs (Meta) instead"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Ask for a GPU and the package."""
        if device.type != "cuda":
            return "breakable-cuda-graphs captures CUDA graphs alone: needs an NVIDIA GPU"
        if find_spec(_PACKAGE) is None:
            return (
                "breakable-cuda-graphs is not installed: pip install breakable-cuda-graphs==0.1.0"
            )
        return None

    def make_runner(self) -> MechanismRunner:
        """Return a runner whose context breaks as the package wants it."""
        package = import_module(_PACKAGE)
        mechanism = MetaCapture(package, self.ground.model.spec.num_layers)
        runner = MechanismRunner(self.ground.model, self.ground, mechanism, self.sizes)
        runner.context = ForeignContext(self.ground.kv_cache, package.no_graph(attention.fn))
        return runner


class ForeignContext(ForwardContext):
    """Break with ``break_for_attention`` where the core's context breaks with its own.

    Args:
        kv_cache: as in ``ForwardContext``.
        break_for_attention: called with this context and a layer.
    """

    def __init__(
        self, kv_cache: PagedKVCache, break_for_attention: Callable[[ForwardContext, int], None]
    ) -> None:
        super().__init__(kv_cache)
        self._break = break_for_attention

    def attend(self, layer: int) -> None:
        """Write keys and values into the cache, then break for attention; see ``ForwardContext.attend``."""
        self.kv_cache.write(layer, self.io.k_TKH, self.io.v_TKH, self.slot_mapping_T)
        self._break(self, layer)


class MetaCapture(Mechanism):
    """Capture with the package's context manager, all graphs in one pool.

    Args:
        package: the imported package.
        breaks: of a forward.
    """

    def __init__(self, package: ModuleType, breaks: int) -> None:
        self._package = package
        self._breaks = breaks
        self._pool: Any = None

    def record(self, begin: Callable[[], None], forward: Callable[[], None]) -> Recording:
        """Capture the forward on padding alone."""
        graph = self._package.BreakableCUDAGraph(pool=self._pool)
        with self._package.breakable_graph(graph):
            begin()
        self._pool = graph.pool()
        return Recording(replay=graph.replay, segments=self._breaks + 1, breaks=self._breaks)

    def memory_bytes(self) -> int | None:
        """Return the bytes reserved by the pool."""
        return None if self._pool is None else pool_bytes(self._pool)
