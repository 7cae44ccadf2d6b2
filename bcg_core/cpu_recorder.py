"""Intercept ATen operations, and record them as a CUDA stream capture would."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_core.errors import CaptureError, HostReadError
from bcg_core.modes import OwnMode

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
_READING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
_STORAGE_CHANGES = frozenset(
    {"aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_"}
)
_HOST_READS = frozenset(
    {
        Tensor.tolist,
        Tensor.numpy,
        Tensor.cpu,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__repr__,
        Tensor.__format__,
    }
)
# Reads its operand on the host on CUDA, and is not tagged for it.
_UNTAGGED_HOST_READS = frozenset({_aten._linalg_check_errors.default})


@dataclass(frozen=True, slots=True)
class Operation:
    """Run one recorded operation into the tensors its capture returned.

    Attributes:
        func: the ATen operation.
        args: its operands; tensors are the recorded ones.
        kwargs: likewise.
        outputs: position among the flattened results, and the tensor to copy that result into. Results that alias an
            operand (in-place and ``out=`` operations) are not listed: the operation itself writes them.
        default_dtype: what torch made of numbers and integers at capture, as a kernel does for good.
    """

    func: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, Tensor], ...]
    default_dtype: torch.dtype

    def run(self) -> None:
        """Compute, and put the results at their captured addresses."""
        results = pytree.tree_leaves(self.func(*self.args, **self.kwargs))
        for position, output in self.outputs:
            output.copy_(results[position])


class CPUSegment:
    """Hold the operations of one segment, their operands and their results."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        recorded = tuple(operations)
        self.operations = tuple(op for op in recorded if op.func not in _ALLOCATIONS)
        self._results = [output for op in recorded for _, output in op.outputs]

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
        """Run all operations in order."""
        before = torch.get_default_dtype()
        try:
            for operation in self.operations:
                torch.set_default_dtype(operation.default_dtype)
                operation.run()
        finally:
            torch.set_default_dtype(before)


class HostReadGuard(OwnMode, TorchFunctionMode):
    """Catch the host reads that never become an ATen operation, as ``.tolist()`` does not."""

    def __init__(self, recorder: "CPURecorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse a host read inside a segment, pass everything else on."""
        if self._recorder.recording and func in _HOST_READS:
            raise self._recorder.refuse(_host_read(f"Tensor.{getattr(func, '__name__', func)}"))
        return func(*args, **(kwargs or {}))


class CPURecorder(OwnMode, TorchDispatchMode):
    """Record operations between ``start`` and ``finish``; outside of that let them pass.

    Views are made at once, as they are only addresses. Everything else is recorded without being run; its result is
    shaped by fake-tensor propagation and filled with poison.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
        self._operations: list[Operation] | None = None
        self._refusal: CaptureError | None = None
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    @property
    def recording(self) -> bool:
        """Tell whether operations are recorded rather than run."""
        return self._operations is not None

    def start(self) -> None:
        """Begin a segment."""
        self._operations, self._refusal = [], None

    def finish(self) -> CPUSegment:
        """End the segment and return it, unless an operation was refused: then raise for that."""
        assert self._operations is not None, "finish() without start()"
        refusal, operations = self._refusal, self._operations
        self.drop()
        if refusal is not None:
            raise CaptureError(
                "the segment became invalid when an operation in it was refused"
            ) from refusal
        return CPUSegment(operations)

    def drop(self) -> None:
        """Forget the segment at hand and stop recording."""
        self._operations, self._refusal = None, None

    def refuse(self, error: CaptureError) -> CaptureError:
        """Make the segment invalid because of ``error``, and return that for raising."""
        self._refusal = error
        return error

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record ``func`` or run it, depending on whether a segment is open."""
        kwargs = kwargs or {}
        if self._operations is None:
            return func(*args, **kwargs)
        if func is _aten.detach_.default:
            # Concerns autograd alone; torch.tensor(3.0), a constant here as on CUDA, ends with it.
            return func(*args, **kwargs)
        self._refuse_host_reads(func, args, kwargs)
        if _decomposes(func):
            # Not func.decompose(), which prefers Python decompositions: they need not have the bits of the kernel.
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if _is_view(func):
            result = func(*args, **kwargs)
            if _share_storage(result, (args, kwargs)):
                return result
        return self._record(func, args, kwargs)

    def _refuse_host_reads(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        name = func.name()
        if func in _INDEXING:
            if _indexes_by_mask(func, args):
                raise self.refuse(_host_read(f"{name} with a boolean mask"))
        elif func in _UNTAGGED_HOST_READS or _READING_TAGS & set(func.tags):
            raise self.refuse(_host_read(name))
        if name.split(".")[0] in _STORAGE_CHANGES or torch.Tag.inplace_view in func.tags:
            raise self.refuse(
                CaptureError(
                    f"{name} changes a tensor's address or geometry in place, which a segment cannot record"
                )
            )
        if func is _aten.lift_fresh.default and args[0].dim() > 0:
            raise self.refuse(
                CaptureError(
                    "host data became a tensor inside a segment (torch.tensor, torch.as_tensor): its values would be "
                    "frozen at capture; make the tensor before, and refresh it in place"
                )
            )

    def _record(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        shapes, structure = pytree.tree_flatten(self._infer(func, args, kwargs))
        written = _returned_operands(func, args, kwargs)
        results: list[Any] = []
        fresh: list[tuple[int, Tensor]] = []
        for position, shape in enumerate(shapes):
            if position in written:
                results.append(written[position])
            elif isinstance(shape, Tensor):
                output = _poisoned(shape)
                results.append(output)
                fresh.append((position, output))
            else:
                results.append(shape)
        assert self._operations is not None
        frozen_args, frozen_kwargs = pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        self._operations.append(
            Operation(func, frozen_args, frozen_kwargs, tuple(fresh), torch.get_default_dtype())
        )
        return pytree.tree_unflatten(results, structure)

    def _infer(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Propagate shapes; raises what the operation itself would raise for its operands."""
        with self._fake:
            fake_args, fake_kwargs = pytree.tree_map_only(Tensor, _shape_only, (args, kwargs))
        try:
            with _quietly(), self._fake:
                shapes = func(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.refuse(_host_read(func.name())) from error
        except UnsupportedOperatorException as error:
            raise self.refuse(
                CaptureError(
                    f"{func.name()} has no fake (shape-only) implementation, which the CPU engine needs to record it; "
                    "register one with torch.library.register_fake, or call it in a break"
                )
            ) from error
        written = _mutated(func, args, kwargs)
        written_shapes = _mutated(func, fake_args, fake_kwargs)
        for real, fake in zip(written, written_shapes, strict=True):
            if real.shape != fake.shape:
                raise self.refuse(
                    CaptureError(
                        f"{func.name()} would resize its output from {tuple(real.shape)} to {tuple(fake.shape)}; "
                        "a segment needs outputs of the right shape"
                    )
                )
        return shapes


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


def _host_read(what: str) -> HostReadError:
    return HostReadError(
        f"{what} reads a device value on the host inside a segment: the value does not exist at capture and would be "
        "frozen at replay. Move it into a break (eager_on_graph), or keep the computation on the device"
    )


def _decomposes(func: OpOverload[..., Any]) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_view(func: OpOverload[..., Any]) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(ret.alias_info is not None for ret in schema.returns)


def _bound(
    func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Any, Any]]:
    """Pair the schema's arguments with the operands given for them."""
    schema = func._schema.arguments
    pairs = list(zip(schema, args, strict=False))
    return pairs + [
        (argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs
    ]


def _written_alias(argument: Any) -> frozenset[str] | None:
    """Return the alias set of a schema argument or result that is written, None for all others."""
    info = argument.alias_info
    return frozenset(info.before_set) if info is not None and info.is_write else None


def _mutated(
    func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """List the tensors that ``func`` writes in place."""
    operands = [value for argument, value in _bound(func, args, kwargs) if _written_alias(argument)]
    return [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, Tensor)]


def _returned_operands(
    func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, Tensor]:
    """Map result positions to the operands that ``func`` writes and returns there."""
    operands = {_written_alias(argument): value for argument, value in _bound(func, args, kwargs)}
    aliases = [_written_alias(result) for result in func._schema.returns]
    return {position: operands[alias] for position, alias in enumerate(aliases) if alias}


def _storages(tree: Any) -> set[int]:
    return {
        leaf.untyped_storage()._cdata
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor)
    }


def _share_storage(result: Any, operands: Any) -> bool:
    return _storages(result) <= _storages(operands)


def _indexes_by_mask(func: OpOverload[..., Any], args: tuple[Any, ...]) -> bool:
    """Tell whether the elements that a mask selects would be counted on the host."""
    indices = [index for index in args[1] if index is not None]
    by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    # Setting one mask's elements to a number is a masked fill, which needs no count; accumulating is none.
    fills = (
        func is not _aten.index.Tensor
        and len(indices) == 1
        and args[2].dim() == 0
        and not any(args[3:])
    )
    return by_mask and not fills


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
        tensor = torch.empty_strided(
            shape.size(), shape.stride(), dtype=shape.dtype, device=shape.device
        )
    if shape.dtype.is_floating_point or shape.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if shape.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(shape.dtype).max)
