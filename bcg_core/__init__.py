"""Capture and replay of prefill in CUDA graph segments, and the protocol for attention backends."""

from bcg_core.attention import causal_attention, low_attention
from bcg_core.backend import AttentionBackend, Capabilities, Metadata
from bcg_core.batch import Chunk, PrefillBatch
from bcg_core.boundary import BoundaryBuffers, BoundaryRows
from bcg_core.breaks import Break, break_graph, eager_on_graph, is_capturing
from bcg_core.buckets import Admission, TokenBuckets
from bcg_core.context import ForwardContext, Phase
from bcg_core.cpu_engine import CPUSegmentEngine
from bcg_core.cuda_engine import CUDASegmentEngine
from bcg_core.device_indices import DeviceIndices
from bcg_core.engine import Segment, SegmentEngine, engine_for
from bcg_core.errors import (
    AmbientStateError,
    BackendContractError,
    BackendError,
    BackendLoadError,
    BackendOptionError,
    BackendUnavailableError,
    BatchError,
    BcgError,
    BreakOutputError,
    BucketError,
    CaptureError,
    CheckpointError,
    DebugError,
    DuplicateBackendError,
    HiddenOutputError,
    HostReadError,
    KVCacheError,
    NestedCaptureError,
    PaddingLeakError,
    RunnerBusyError,
    StaleTensorError,
    StrayWriteError,
    StreamError,
    SynchronisationError,
    UnknownBackendError,
    UnsupportedSpecError,
)
from bcg_core.graph import BreakableCUDAGraph, BreakableCUDAGraphCapture
from bcg_core.kv_cache import PagedKVCache
from bcg_core.kv_sequence import KVSequence
from bcg_core.model import PrefillModel
from bcg_core.pages import negotiate_page_size
from bcg_core.registry import ENTRY_POINT_GROUP, BackendRegistry, create_backend
from bcg_core.results import CapturedBucket, CaptureReport, Mode, PrefillResult, RunnerStats
from bcg_core.runner import PrefillRunner, greedy
from bcg_core.spec import AttentionSpec, BackendLimits, ModelSpec
from bcg_core.workspace import StaticInputs, Workspace

__all__ = [
    "ENTRY_POINT_GROUP",
    "Admission",
    "AmbientStateError",
    "AttentionBackend",
    "AttentionSpec",
    "BackendContractError",
    "BackendError",
    "BackendLimits",
    "BackendLoadError",
    "BackendOptionError",
    "BackendRegistry",
    "BackendUnavailableError",
    "BatchError",
    "BcgError",
    "BoundaryBuffers",
    "BoundaryRows",
    "Break",
    "BreakOutputError",
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "BucketError",
    "CPUSegmentEngine",
    "CUDASegmentEngine",
    "Capabilities",
    "CaptureError",
    "CaptureReport",
    "CapturedBucket",
    "CheckpointError",
    "Chunk",
    "DebugError",
    "DeviceIndices",
    "DuplicateBackendError",
    "ForwardContext",
    "HiddenOutputError",
    "HostReadError",
    "KVCacheError",
    "KVSequence",
    "Metadata",
    "Mode",
    "ModelSpec",
    "NestedCaptureError",
    "PaddingLeakError",
    "PagedKVCache",
    "Phase",
    "PrefillBatch",
    "PrefillModel",
    "PrefillResult",
    "PrefillRunner",
    "RunnerBusyError",
    "RunnerStats",
    "Segment",
    "SegmentEngine",
    "StaleTensorError",
    "StaticInputs",
    "StrayWriteError",
    "StreamError",
    "SynchronisationError",
    "TokenBuckets",
    "UnknownBackendError",
    "UnsupportedSpecError",
    "Workspace",
    "break_graph",
    "causal_attention",
    "create_backend",
    "eager_on_graph",
    "engine_for",
    "greedy",
    "is_capturing",
    "low_attention",
    "negotiate_page_size",
]
