"""Dispatch and function modes of torch: ours, and those of a caller."""

from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from bcg_core.errors import AmbientStateError


class OwnMode:
    """Mark a mode of this library, which is on because a call switched it on."""


def refuse_modes(what: str) -> None:
    """Raise AmbientStateError under a mode that is neither ours nor the default device, which torch keeps as one."""
    kinds = {
        "dispatch": _get_current_dispatch_mode_stack(),
        "function": _get_current_function_mode_stack(),
    }
    for kind, modes in kinds.items():
        for mode in modes:
            if not isinstance(mode, OwnMode | DeviceContext):
                name = type(mode).__name__.lstrip("_")  # torch hides that of FlopCounterMode
                raise AmbientStateError(
                    f"{what} under {name}, a torch {kind} mode: it might change what is made and recorded, and sees "
                    "nothing of a replay but the breaks. Leave the mode for this call; torch.profiler counts (also "
                    "FLOPs, with_flops=True) and bcg_core.debug watches without one"
                )
