"""Intercept ATen operations, and record them as a CUDA stream capture would."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_core.cpu_generators import GeneratorGuard
from bcg_core.cpu_host_reads import host_read, refused_read
from bcg_core.cpu_operands import (
    Func,
    decomposes,
    is_view,
    mutated,
    pinned,
    returned_operands,
    share_storage,
)
from bcg_core.cpu_segment import CPUSegment, Operation
from bcg_core.errors import CaptureError

_aten = torch.ops.aten
_STORAGE_CHANGES = frozenset(
    {"aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_"}
)


class CPURecorder(TorchDispatchMode):
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
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

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
        self._refuse_layouts(func, (args, kwargs))
        inferred = self._infer(func, args, kwargs)
        self._refuse_layouts(func, inferred)
        shapes, structure = pytree.tree_flatten(inferred)
        written = returned_operands(func, args, kwargs)
        results: list[Any] = []
        fresh: list[tuple[int, Tensor]] = []
        for position, shape in enumerate(shapes):
            if position in written:
                results.append(written[position])
            elif isinstance(shape, Tensor):
                output = _poisoned(shape)
                results.append(output)
                fresh.append((position, pinned(output)))
            else:
                results.append(shape)
        assert self._operations is not None
        frozen_args, frozen_kwargs = pytree.tree_map_only(Tensor, pinned, (args, kwargs))
        self._operations.append(Operation(func, frozen_args, frozen_kwargs, tuple(fresh)))
        return pytree.tree_unflatten(results, structure)

    def _refuse_layouts(self, func: Func, tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
                raise self.refuse(
                    CaptureError(
                        f"{func.name()} takes or makes a tensor of {leaf.layout}, which the CPU engine cannot record; "
                        "use dense tensors, or call it in a break"
                    )
                )

    def _infer(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Propagate shapes; raises what the operation itself would raise for its operands."""
        with self._fake:
            fake_args, fake_kwargs = pytree.tree_map_only(Tensor, _shape_only, (args, kwargs))
        try:
            with _quietly(), self._fake:
                shapes = func(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.refuse(host_read(func.name())) from error
        except UnsupportedOperatorException as error:
            raise self.refuse(
                CaptureError(
                    f"{func.name()} has no fake (shape-only) implementation, which the CPU engine needs to record it; "
                    "register one with torch.library.register_fake, or call it in a break"
                )
            ) from error
        written = mutated(func, args, kwargs)
        written_shapes = mutated(func, fake_args, fake_kwargs)
        for real, fake in zip(written, written_shapes, strict=True):
            if real.shape != fake.shape:
                raise self.refuse(
                    CaptureError(
                        f"{func.name()} would resize its output from {tuple(real.shape)} to {tuple(fake.shape)}; "
                        "a segment needs outputs of the right shape"
                    )
                )
        return shapes


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


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep shape propagation from logging or warning of what is raised as an error anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="An output with one or more elements was resized"
            )
            yield
    finally:
        logger.disabled = disabled


def _shape_only(tensor: Tensor) -> Tensor:
    """Return a tensor of that geometry; under a fake mode one without memory.

    Not ``FakeTensorMode.from_tensor``: it follows views to their base, which fails where the dtypes differ (complex
    views), and remembers shapes that a break may have changed since.
    """
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _poisoned(shape: Tensor) -> Tensor:
    """Allocate a tensor of that geometry whose values nobody can mistake for results."""
    with torch.inference_mode(False):
        tensor = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    if shape.dtype.is_floating_point or shape.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if shape.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(shape.dtype).max)
