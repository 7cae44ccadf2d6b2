"""See every operation of a capture, and leave it as it is."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_core.debug.record import CaptureRecord, memory_of, tensors_in
from bcg_core.debug.tool import Tool
from bcg_core.errors import DebugError
from bcg_core.modes import OwnMode

_aten = torch.ops.aten
# What torch.tensor ends with: its operand came into being just now, unseen.
_LIFTS = frozenset({_aten.lift.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default})


class Observer(OwnMode, TorchDispatchMode):
    """Tell a record, and the tools, what the operations of a capture read, write and make.

    Only observes: what runs and what is recorded is the same without it. What happens below the dispatcher is not
    seen: inside a kernel that ``torch.compile`` made, or inside a vendor's extension.

    Args:
        record: of the capture.
        tools: hear of what segments touch.
        device: whose work is recorded. A number that lies on the host is part of a CUDA kernel's launch and of no
            interest.
    """

    def __init__(self, record: CaptureRecord, tools: Sequence[Tool], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
        self._record = record
        self._tools = tools
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run as they are; without this, torch.compile refuses to work below a mode."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note what ``func`` does, and run it."""
        kwargs = kwargs or {}
        record = self._record
        if record.in_segment:
            if _touches_operands(func):
                self._in_segment(func.name(), tensors_in((args, kwargs)))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if record.site is not None:
            known = set() if func in _LIFTS else {memory_of(x) for x in tensors_in((args, kwargs))}
            for tensor in tensors_in(result):
                if memory_of(tensor) not in known:
                    record.make(tensor, record.site, func.name())
        return result

    def _in_segment(self, name: str, operands: list[Tensor]) -> None:
        record = self._record
        where = f"{name} in segment {record.segments - 1}"
        for tensor in operands:
            if tensor.dim() == 0 and tensor.device.type != self._device.type:
                continue
            record.access(tensor, where)
            try:
                for tool in self._tools:
                    tool.touches(record, tensor, where)
            except DebugError as error:
                # Whoever swallows it makes the capture fail all the same.
                record.failure = error
                raise


def _touches_operands(func: OpOverload[..., Any]) -> bool:
    """Tell whether ``func`` has to do with the elements of its operands, not with their geometry alone."""
    schema = func._schema
    makes_view = not schema.is_mutable and any(ret.alias_info is not None for ret in schema.returns)
    name = schema.name.rpartition("::")[2]
    return not makes_view and not name.startswith("new_") and not name.endswith("_like")
