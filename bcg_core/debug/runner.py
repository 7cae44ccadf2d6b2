"""A runner that is watched by every debug tool."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from bcg_core.backend import AttentionBackend
from bcg_core.debug.engine import WatchedEngine
from bcg_core.debug.hidden_outputs import HiddenOutputDetector
from bcg_core.debug.kv_writes import KVWriteGuard
from bcg_core.debug.padding import PaddingPoison
from bcg_core.debug.pointers import PointerGuard
from bcg_core.debug.streams import StreamGuard
from bcg_core.debug.syncs import SyncGuard
from bcg_core.debug.tool import Tool
from bcg_core.engine import SegmentEngine, engine_for
from bcg_core.kv_cache import PagedKVCache
from bcg_core.model import PrefillModel
from bcg_core.runner import PrefillRunner

if TYPE_CHECKING:
    from bcg_core.batch import PrefillBatch
    from bcg_core.buckets import Admission
    from bcg_core.workspace import Workspace


def all_tools() -> tuple[Tool, ...]:
    """Return one of each tool."""
    return (
        PointerGuard(),
        HiddenOutputDetector(),
        StreamGuard(),
        SyncGuard(),
        PaddingPoison(),
        KVWriteGuard(),
    )


class WatchedRunner(PrefillRunner):
    """Serve batches as a ``PrefillRunner`` does, watched by debug tools: slower, waiting for the device, same results.

    Takes what a ``PrefillRunner`` takes, and raises a subclass of ``DebugError`` for what a tool finds, at capture or
    at a replay. After one of these the KV cache and the results are whatever the fault made of them.

    Args:
        tools: what to watch for; default is all of them.
    """

    def __init__(
        self,
        model: PrefillModel,
        kv_cache: PagedKVCache,
        backend: AttentionBackend | str,
        *,
        tools: Sequence[Tool] | None = None,
        engine: SegmentEngine | None = None,
        **arguments: Any,
    ) -> None:
        self._tools = all_tools() if tools is None else tuple(tools)
        watched = WatchedEngine(engine or engine_for(kv_cache.device), self._tools)
        super().__init__(model, kv_cache, backend, engine=watched, **arguments)
        for tool in self._tools:
            tool.attach(self)

    def _forward(
        self, batch: "PrefillBatch", workspace: "Workspace", padded: int, admission: "Admission"
    ) -> None:
        with ExitStack() as stack:
            if admission.bucket is not None:
                for tool in self._tools:
                    stack.enter_context(tool.around_replay(self, batch, padded))
            super()._forward(batch, workspace, padded, admission)
