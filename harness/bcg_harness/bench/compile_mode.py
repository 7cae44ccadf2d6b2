"""Prefill compiled by ``torch.compile``, split at attention, with the CUDA graphs that torch makes of the pieces."""

from collections.abc import Callable
from typing import Any

import torch

from bcg_core import AttentionBackend
from bcg_harness.bench.compiled_llama import CompiledLlama
from bcg_harness.bench.mechanism import (
    Mechanism,
    MechanismMode,
    MechanismRunner,
    Recording,
    pool_bytes,
)
from bcg_harness.bench.setup import ModeSetup


class CompilePiecewise(MechanismMode):
    """Run pieces compiled with ``mode="reduce-overhead"``, each piece of each layer and bucket a CUDA graph of torch's.

    Between the pieces, ordinary Python writes keys and values into the cache and calls the backend. Beyond the largest
    bucket the same pieces run without CUDA graphs and padding.
    """

    name = "compile_piecewise"
    summary = "torch.compile, split at attention, with torch's own CUDA graphs of the pieces"

    def make_runner(self) -> MechanismRunner:
        """Return a runner of the compiled pieces."""
        model = CompiledLlama(self.ground.plain, graphed=self.sizes)
        pieces = model.spec.num_layers + 1
        return MechanismRunner(
            model, self.ground, TorchCompile(self.ground.device, pieces), self.sizes
        )

    def prepare(self, backend: AttentionBackend, label: str) -> ModeSetup:
        """Compile and record at the first call; torch is kept from warning of many sizes, as each bucket is one."""
        import torch._inductor.config as inductor

        with inductor.patch({"triton.cudagraph_dynamic_shape_warn_limit": None}):
            return super().prepare(backend, label)

    def notes(self) -> list[str]:
        """Say where torch made fewer CUDA graphs than there are pieces."""
        if self.ground.device.type != "cuda":
            return ["compiled only: CUDA graphs need a GPU"]
        mechanism = None if self._runner is None else self._runner.mechanism
        return mechanism.notes if isinstance(mechanism, TorchCompile) else []


class TorchCompile(Mechanism):
    """Let CUDA graph trees record what was compiled in warm-up.

    Args:
        device: where it runs.
        pieces: of a forward.

    Attributes:
        notes: what did not go as meant.
    """

    def __init__(self, device: torch.device, pieces: int) -> None:
        self.notes: list[str] = []
        self._device = device
        self._pieces = pieces

    def record(self, begin: Callable[[], None], forward: Callable[[], None]) -> Recording:
        """Run the forward twice: torch records the first time and replays the second."""
        before = self._graphs()
        begin()
        begin()
        graphs = self._graphs() - before
        if self._device.type == "cuda" and graphs != self._pieces:
            self.notes.append(
                f"torch made {graphs} CUDA graphs of the {self._pieces} pieces of a bucket: "
                "TORCH_LOGS=cudagraphs says why"
            )
        return Recording(replay=forward, segments=graphs, breaks=self._pieces - 1)

    def memory_bytes(self) -> int | None:
        """Return the bytes reserved by the pool of torch's graphs, which everything compiled shares."""
        manager = self._manager()
        if manager is None:
            return None
        return pool_bytes(manager.cuda_graphs_thread_pool)

    def _graphs(self) -> int:
        manager = self._manager()
        if manager is None:
            return 0
        return sum(1 + root.num_descendants() for root in manager.get_roots())

    def _manager(self) -> Any:
        """Return what holds torch's recordings on this device; None before the first and on a CPU."""
        if self._device.type != "cuda":
            return None
        from torch._inductor.cudagraph_trees import get_manager

        index = self._device.index
        return get_manager(
            torch.cuda.current_device() if index is None else index, create_if_none_exists=False
        )
