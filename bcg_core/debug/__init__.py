"""Tools that find faults of models, breaks and backends while they run; off, and not even imported, by default.

``WatchedRunner`` is a ``PrefillRunner`` with all of them, ``WatchedEngine`` an engine for bare graphs.
"""

from bcg_core.debug.engine import WatchedEngine
from bcg_core.debug.hidden_outputs import HiddenOutputDetector
from bcg_core.debug.kv_writes import KVWriteGuard
from bcg_core.debug.layout import Layout
from bcg_core.debug.padding import PaddingPoison, poison
from bcg_core.debug.pointers import PointerGuard
from bcg_core.debug.record import Access, CaptureRecord, Made, Site
from bcg_core.debug.runner import WatchedRunner, all_tools
from bcg_core.debug.streams import StreamGuard
from bcg_core.debug.syncs import SyncGuard, synchronisation
from bcg_core.debug.tool import Tool

__all__ = [
    "Access",
    "CaptureRecord",
    "HiddenOutputDetector",
    "KVWriteGuard",
    "Layout",
    "Made",
    "PaddingPoison",
    "PointerGuard",
    "Site",
    "StreamGuard",
    "SyncGuard",
    "Tool",
    "WatchedEngine",
    "WatchedRunner",
    "all_tools",
    "poison",
    "synchronisation",
]
