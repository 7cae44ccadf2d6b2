"""Intercept ATen operations, and record them as a CUDA stream capture would."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_core.cpu_generators import GeneratorGuard
from bcg_core.cpu_host_reads import refused_read
from bcg_core.cpu_operands import (
    Func,
    decomposes,
    is_view,
    pinned,
    returned_operands,
    share_storage,
)
from bcg_core.cpu_segment import CPUSegment, Operation
from bcg_core.cpu_shapes import ShapeInference, poisoned
from bcg_core.errors import CaptureError
from bcg_core.modes import OwnMode

_aten = torch.ops.aten
_STORAGE_CHANGES = frozenset(
    {"aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_"}
)


class CPURecorder(OwnMode, TorchDispatchMode):
    """Record operations between ``start`` and ``finish``; outside of that let them pass.

    Views are made at once, as they are only addresses, and changes of a tensor's shape in place likewise. Everything
    else is recorded without being run; its result is shaped by fake-tensor propagation and filled with poison.

    Args:
        generators: random generators that a segment may draw from.
    """

    def __init__(self, generators: GeneratorGuard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
        self._operations: list[Operation] | None = None
        self._refusal: CaptureError | None = None
        self._generators = generators
        self._shapes = ShapeInference()

    @property
    def recording(self) -> bool:
        """Tell whether operations are recorded rather than run."""
        return self._operations is not None

    def start(self) -> None:
        """Begin a segment."""
        self._generators.begin()
        self._operations, self._refusal = [], None

    def finish(self) -> CPUSegment:
        """End the segment and return it, unless an operation was refused: then raise for that."""
        assert self._operations is not None, "finish() without start()"
        refusal, operations = self._refusal, self._operations
        self._operations = None
        seeding = self._generators.seeding()
        self.drop()
        if refusal is not None:
            raise CaptureError(
                "the segment became invalid when an operation in it was refused"
            ) from refusal
        if seeding is not None:
            raise seeding
        return CPUSegment(operations)

    def drop(self) -> None:
        """Forget the segment at hand, if any, and stop recording."""
        self._operations, self._refusal = None, None
        self._generators.end()

    def refuse(self, error: CaptureError) -> CaptureError:
        """Make the segment invalid because of ``error``, and return that for raising."""
        self._refusal = error
        return error

    def __torch_dispatch__(
        self,
        func: Func,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record ``func`` or run it, depending on whether a segment is open."""
        kwargs = kwargs or {}
        if self._operations is None:
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if decomposes(func):
            # Not func.decompose(), which prefers Python decompositions: they need not have the bits of the kernel.
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if is_view(func):
            result = func(*args, **kwargs)
            if share_storage(result, (args, kwargs)):
                return result
        return self._record(func, args, kwargs)

    def _check(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what a stream capture would, or what a segment cannot hold."""
        refusal = refused_read(func, args, kwargs) or _frozen(func, args)
        if refusal is None and torch.Tag.nondeterministic_seeded in func.tags:
            refusal = self._generators.stranger((args, kwargs)) or self._generators.seeding()
        if refusal is not None:
            raise self.refuse(refusal)

    def _record(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            shapes, structure = pytree.tree_flatten(self._shapes.infer(func, args, kwargs))
        except CaptureError as error:
            self.refuse(error)
            raise
        written = returned_operands(func, args, kwargs)
        results: list[Any] = []
        fresh: list[tuple[int, Tensor]] = []
        for position, shape in enumerate(shapes):
            if position in written:
                results.append(written[position])
            elif isinstance(shape, Tensor):
                output = poisoned(shape)
                results.append(output)
                fresh.append((position, pinned(output)))
            else:
                results.append(shape)
        assert self._operations is not None
        frozen_args, frozen_kwargs = pytree.tree_map_only(Tensor, pinned, (args, kwargs))
        self._operations.append(
            Operation(func, frozen_args, frozen_kwargs, tuple(fresh), torch.get_default_dtype())
        )
        return pytree.tree_unflatten(results, structure)


def _frozen(func: Func, args: tuple[Any, ...]) -> CaptureError | None:
    """Return the refusal of an operation that a replay would not do again, None for all others."""
    name = func.name()
    if name.split(".")[0] in _STORAGE_CHANGES:
        return CaptureError(f"{name} changes a tensor's memory, which a segment cannot record")
    if func is _aten.lift_fresh.default and args[0].dim() > 0:
        return CaptureError(
            "host data became a tensor inside a segment (torch.tensor, torch.as_tensor): its values would be frozen at "
            "capture; make the tensor before, and refresh it in place"
        )
    return None
