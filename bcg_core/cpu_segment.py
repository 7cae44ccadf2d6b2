"""A segment of the emulator: recorded ATen operations, and the memory that they use."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_core.cpu_operands import Func
from bcg_core.errors import CaptureError

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.empty_permuted.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Run one recorded operation into the tensors its capture returned.

    Attributes:
        func: the ATen operation.
        args: its operands; tensors are aliases that stay where the recorded ones were.
        kwargs: likewise.
        outputs: position among the flattened results, and the tensor to copy that result into. Results that alias an
            operand (in-place and ``out=`` operations) are not listed: the operation itself writes them.
        default_dtype: what torch made of numbers and integers at capture, as a kernel does for good.
    """

    func: Func
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, Tensor], ...]
    default_dtype: torch.dtype

    def run(self) -> None:
        """Compute, and put the results at their captured addresses."""
        results = pytree.tree_leaves(self.func(*self.args, **self.kwargs))
        for position, output in self.outputs:
            # What an operation leaves out (mkldnn_rnn_layer its workspace), shape propagation may have listed.
            if results[position] is not None:
                output.copy_(results[position])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it reads and writes."""
        for leaf in pytree.tree_leaves((self.args, self.kwargs, self.outputs)):
            if isinstance(leaf, Tensor):
                yield leaf


class CPUSegment:
    """Hold the operations of one segment, their operands and their results."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        recorded = tuple(operations)
        self.operations = tuple(op for op in recorded if op.func not in _ALLOCATIONS)
        self._results = [output for op in recorded for _, output in op.outputs]
        storages = (tensor.untyped_storage() for op in recorded for tensor in op.tensors())
        self._sizes = tuple({s._cdata: (s, s.nbytes()) for s in storages}.values())

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of the results that this segment holds."""
        return sum(result.untyped_storage().nbytes() for result in self._results)

    @property
    def addresses(self) -> set[int]:
        """Return where the results that this segment holds begin."""
        return {result.untyped_storage().data_ptr() for result in self._results}

    @torch.inference_mode()
    def replay(self) -> None:
        """Run all operations in order; raises CaptureError, before any runs, where memory was freed or resized."""
        for storage, size in self._sizes:
            if storage.nbytes() != size:
                raise CaptureError(
                    f"memory that a segment uses had {size} bytes at capture and has {storage.nbytes()} now "
                    "(resize_): a CUDA graph would go on at the old address. Capture again, or copy new values into "
                    "the old tensor"
                )
        before = torch.get_default_dtype()
        try:
            for operation in self.operations:
                torch.set_default_dtype(operation.default_dtype)
                operation.run()
        finally:
            torch.set_default_dtype(before)
