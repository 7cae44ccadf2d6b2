"""An emulator of CUDA graph segments for machines without a GPU.

It exists so that everything built on segments can be developed and tested on a CPU, and therefore obeys CUDA's rules:
recording does not compute, results have fixed addresses, Python does not run at replay, and host reads are refused. It
is no fast path.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

from bcg_core.cpu_functions import FunctionGuard
from bcg_core.cpu_generators import GeneratorGuard
from bcg_core.cpu_recorder import CPURecorder
from bcg_core.cpu_segment import CPUSegment
from bcg_core.engine import SegmentEngine, refuse_inside_capture


class CPUSegmentEngine(SegmentEngine):
    """Record segments as lists of ATen operations with fixed operands.

    During capture nothing is computed: new tensors hold poison (NaN for floating point, the largest value for
    integers, True for booleans) and in-place writes do not happen. Replay runs the operations again into the same
    memory, bit-equal to running them eagerly. Segments keep all their intermediate tensors; a CUDA pool would reuse
    that memory.

    What a segment uses is pinned to the memory and the geometry that it had at capture. A tensor that is given other
    memory since (``w.data = new``, ``module.half()``, ``swap_tensors``) is not followed, as a CUDA graph follows none.
    The old memory is kept alive here; on CUDA it would be free.

    Replays draw new random numbers. Seeding inside a segment is refused, and so is a generator that is not in
    ``generators``.

    Not refused, though a CUDA capture refuses it, because every tensor lives on the CPU: naming the CPU in a copy
    (``x.to("cpu")``, ``host.copy_(x)``), and naming the device by a string for a number (``torch.tensor(3.0,
    device="cpu")``). Without a device, a number is a constant that lies on the host on both; only here may it not be
    read back. Refused, though CUDA captures it: ``resize_``, ``set_`` and copies of tensor objects, outputs of the
    wrong shape, sparse tensors, and host data that becomes a tensor on the host.

    Args:
        generators: random generators besides torch's default one that segments draw from.

    Raises ValueError for a generator of another device, NestedCaptureError inside a capture.
    """

    def __init__(self, *, generators: Iterable[torch.Generator] = ()) -> None:
        refuse_inside_capture()
        self._generators = GeneratorGuard(generators)
        self._recorder: CPURecorder | None = None
        self._segments: WeakSet[CPUSegment] = WeakSet()

    @property
    def device(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Do nothing special: a CPU has no streams."""
        yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Stand ready to intercept operations; they pass through outside ``begin`` and ``end``."""
        recorder = CPURecorder(self._generators)
        with recorder, FunctionGuard(recorder):
            self._recorder = recorder
            try:
                yield
            finally:
                self._recorder = None

    def begin(self) -> None:
        """Start recording operations instead of running them."""
        assert self._recorder is not None, "begin() outside capturing()"
        self._recorder.start()

    def end(self) -> CPUSegment:
        """Return the recorded operations; raises what an operation was refused for."""
        assert self._recorder is not None, "end() outside capturing()"
        segment = self._recorder.finish()
        self._segments.add(segment)
        return segment

    def abort(self) -> None:
        """Forget the operations recorded since ``begin``."""
        if self._recorder is not None:
            self._recorder.drop()

    def holds(self, addresses: Collection[int]) -> set[int]:
        """Return which of these addresses are those of tensors that live segments of this engine made."""
        return {
            address for segment in self._segments for address in segment.addresses
        }.intersection(addresses)

    def memory_bytes(self) -> int:
        """Return the bytes of the intermediate tensors that live segments of this engine hold."""
        return sum(segment.memory_bytes for segment in self._segments)
