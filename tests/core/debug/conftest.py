"""What tests of the debug tools share: captures and runners that are watched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bcg_core import (
    AttentionBackend,
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CPUSegmentEngine,
    PagedKVCache,
    TokenBuckets,
)
from bcg_core.debug import Tool, WatchedEngine, WatchedRunner


@pytest.fixture
def watched_capture() -> Callable[..., tuple[BreakableCUDAGraph, Any]]:
    """Return a function that captures a call, watched by tools, and returns the graph and the call's result."""

    def run(
        fn: Callable[..., Any], *args: Any, tools: list[Tool]
    ) -> tuple[BreakableCUDAGraph, Any]:
        graph = BreakableCUDAGraph(WatchedEngine(CPUSegmentEngine(), tools))
        with torch.no_grad(), BreakableCUDAGraphCapture(graph):
            result = fn(*args)
        return graph, result

    return run


@pytest.fixture
def make_watched(
    kv_cache: PagedKVCache,
    make_backend: Callable[..., AttentionBackend],
    toy_model: type[Any],
) -> Callable[..., WatchedRunner]:
    """Return a function that makes a captured, watched runner of the toy model; all tools unless told otherwise."""

    def make(
        cls: type[WatchedRunner] = WatchedRunner,
        *,
        model: Any = None,
        backend: AttentionBackend | None = None,
        captured: bool = True,
        **arguments: Any,
    ) -> WatchedRunner:
        runner = cls(
            model or toy_model(),
            kv_cache,
            backend or make_backend(),
            buckets=TokenBuckets([8, 16]),
            max_requests=8,
            **arguments,
        )
        if captured:
            runner.capture()
        return runner

    return make
