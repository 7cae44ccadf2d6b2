"""Waits of the host for the device that nobody declared."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bcg_core.debug.record import Site
from bcg_core.debug.tool import Tool
from bcg_core.errors import SynchronisationError

if TYPE_CHECKING:
    from bcg_core.runner import PrefillRunner

_TORCH_SAYS = "called a synchronizing CUDA operation"


class SyncGuard(Tool):
    """Refuse a break that makes the host wait for the device.

    On a runner, for backends that declare ``needs_host_plan=False``; on a bare graph, for all breaks, so it is not
    among the tools that an engine has by default: a break is ordinary Python and may wait. Sees what torch's
    synchronisation debug mode sees; on a CPU there is nothing to wait for.
    """

    def __init__(self) -> None:
        self._runner: PrefillRunner | None = None

    def attach(self, runner: "PrefillRunner") -> None:
        """Ask the runner's backend what it declares."""
        self._runner = runner

    def around_break(
        self, device: torch.device, site: Site, call: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Run ``call`` with synchronisation forbidden."""
        if device.type != "cuda":
            return call

        def watched() -> Any:
            if self._runner is not None and self._runner.backend.capabilities.needs_host_plan:
                return call()
            try:
                with synchronisation("error"):
                    return call()
            except RuntimeError as error:
                if _TORCH_SAYS not in str(error):
                    raise
                raise SynchronisationError(
                    f"{site} made the host wait for the device: keep its values on the device, use the batch's copies "
                    "on the host, or declare needs_host_plan=True"
                ) from error

        return watched


@contextmanager
def synchronisation(allowed: str) -> Iterator[None]:
    """Set torch's synchronisation debug mode inside: ``"default"`` allows to wait for the device, ``"error"`` does not.

    Does nothing where torch has not touched a GPU.
    """
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(allowed)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
