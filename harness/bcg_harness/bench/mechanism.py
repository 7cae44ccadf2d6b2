"""Modes in which something other than the core makes a forward over one bucket repeatable.

The runner stays what it is: buckets, static inputs, attention between the pieces, bucket metadata, LM head. So what is
compared with ``breakable`` is the mechanism alone.

Shape letters: T bucket (padded) tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BreakableCUDAGraph,
    CapturedBucket,
    CaptureReport,
    Mode,
    Phase,
    PrefillBatch,
    PrefillModel,
    PrefillRunner,
    TokenBuckets,
)
from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.mode import ExecutionMode, Ground, Prefilled
from bcg_harness.bench.runner_modes import run, setup_of
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.bench.timing import synchronise
from bcg_harness.probe import idle_backend


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Hold a forward over one bucket that can be run again.

    Attributes:
        replay: runs it again on the live batch of its runner's context.
        segments: graphs in it.
        breaks: stretches of Python between them.
    """

    replay: Callable[[], None]
    segments: int
    breaks: int


class Mechanism(ABC):
    """Make forwards repeatable. Asked for the largest bucket first, after all buckets have been warmed up."""

    @abstractmethod
    def record(self, begin: Callable[[], None], forward: Callable[[], None]) -> Recording:
        """Record a forward.

        Args:
            begin: runs the forward on padding alone: without a batch, attention returns at once.
            forward: runs it on what the context holds, as a replay has to.
        """

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """Return the device bytes that all recordings hold; None where there is no such thing."""


class MechanismRunner(PrefillRunner):
    """Serve batches by what ``mechanism`` recorded; everything else is the core's runner.

    Args:
        model: what to run.
        ground: gives cache and limits.
        mechanism: takes the place of segments.
        buckets: token counts to record.
    """

    def __init__(
        self,
        model: PrefillModel,
        ground: Ground,
        mechanism: Mechanism,
        buckets: Iterable[int],
    ) -> None:
        super().__init__(
            model,
            ground.kv_cache,
            idle_backend(AttentionSpec.of(model.spec, page_size=ground.kv_cache.page_size)),
            buckets=buckets,
            max_requests=ground.max_requests,
        )
        self.mechanism = mechanism

    def capture(self, progress: Callable[[int, int], None] | None = None) -> CaptureReport:
        """Warm up, then record every bucket from the largest to the smallest; see ``PrefillRunner.capture``."""
        report = super().capture(progress)
        return replace(report, memory_bytes=self.mechanism.memory_bytes() or 0)

    def _capture_bucket(self, size: int) -> tuple[BreakableCUDAGraph, CapturedBucket]:
        held, begun = self.mechanism.memory_bytes() or 0, perf_counter()
        recording = self.mechanism.record(
            lambda: self._run_model(Phase.CAPTURE, self.workspace, size),
            lambda: self._compute(self.workspace, self.workspace.inputs(size)),
        )
        synchronise(self.model.spec.device)
        seconds = perf_counter() - begun
        graph = BreakableCUDAGraph(self.engine)
        graph.publish([recording], [])
        return graph, CapturedBucket(
            bucket=size,
            segments=recording.segments,
            breaks=recording.breaks,
            seconds=seconds,
            memory_bytes=(self.mechanism.memory_bytes() or 0) - held,
        )


class MechanismMode(ExecutionMode):
    """Prefill with a ``MechanismRunner``, which records once for all backends.

    Args:
        ground: what all modes share.
        sizes: the buckets of ``ground`` to record; default is those that are needed. Batches of others go to the next
            larger one.
    """

    def __init__(self, ground: Ground, *, sizes: Iterable[int] | None = None) -> None:
        super().__init__(ground)
        chosen = sizes or ground.needed or ground.buckets
        self.sizes = TokenBuckets(sorted(set(chosen)))
        self._runner: MechanismRunner | None = None

    @abstractmethod
    def make_runner(self) -> MechanismRunner:
        """Return the runner of this mode, which has recorded nothing yet."""

    def prepare(self, backend: AttentionBackend, label: str) -> ModeSetup:
        """Record all sizes at the first call, and make ``backend`` ready for them at every call."""
        report = None
        if self._runner is None:
            runner = self.make_runner()
            report = runner.capture()
            self._runner = runner
        self._runner.use_backend(backend)
        setup = setup_of(report, NO_BACKEND, self.name)
        if report is None or self._runner.mechanism.memory_bytes() is not None:
            return setup
        return replace(setup, graph_memory=None)

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run ``batch`` in its bucket, or without padding beyond the largest."""
        assert self._runner is not None, "prepare() comes first"
        return run(self._runner, batch, Mode.BREAKABLE)


def pool_bytes(pool: Any) -> int:
    """Return the device bytes that the CUDA graph pool of this handle has reserved."""
    return sum(int(block["total_size"]) for block in torch.cuda.memory_snapshot(pool))
