"""The modes that the core's runner has by itself: eager, padded eager, breakable, and one full graph a bucket."""

from typing import ClassVar

import torch

from bcg_core import AttentionBackend, CaptureReport, Mode, PrefillBatch, PrefillRunner
from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.mode import ExecutionMode, Prefilled
from bcg_harness.bench.setup import BucketRecord, ModeSetup


class RunnerMode(ExecutionMode):
    """Prefill through a runner that all modes of the same model share; captures at most once for all backends."""

    how: ClassVar[Mode]
    fused: ClassVar[bool] = True
    """Run the model whose element-wise functions are compiled, where there is one."""

    @property
    def runner(self) -> PrefillRunner:
        """Return the runner that this mode prefills with."""
        return self.ground.runner if self.fused else self.ground.plain_runner

    def prepare(self, backend: AttentionBackend, label: str) -> ModeSetup:
        """Capture, when this mode replays and nothing is captured yet, and switch to ``backend``."""
        report = None
        if self.how is Mode.BREAKABLE and not self.runner.graphs:
            report = self.runner.capture()
        self.runner.use_backend(backend)
        return setup_of(report, NO_BACKEND, self.name)

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run ``batch`` through the runner, with the backend that the mode was prepared for."""
        return run(self.runner, batch, self.how)


class NeedsFusion:
    """Be possible only where there are compiled element-wise functions; elsewhere it would be another mode again."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Ask for CUDA."""
        if device.type == "cuda":
            return None
        return "element-wise functions are compiled on CUDA only, so this would be the same as without them"


class Eager(RunnerMode):
    """Run without graphs and without padding; element-wise functions as PyTorch has them."""

    name = "eager"
    summary = "no graphs, no padding; element-wise functions as PyTorch has them"
    how = Mode.EAGER
    fused = False


class EagerFused(NeedsFusion, RunnerMode):
    """Run without graphs and without padding, with compiled element-wise functions."""

    name = "eager_fused"
    summary = "eager, with element-wise functions compiled by torch.compile (CUDA)"
    how = Mode.EAGER


class PaddedEager(RunnerMode):
    """Run the very work of ``breakable``, at its padded shape, without graphs."""

    name = "padded_eager"
    summary = "the work of breakable, padding included, without graphs"
    how = Mode.PADDED_EAGER


class Breakable(RunnerMode):
    """Replay captured segments, with attention between them."""

    name = "breakable"
    summary = "captured segments with attention between them"
    how = Mode.BREAKABLE


class BreakableUnfused(NeedsFusion, RunnerMode):
    """Replay captured segments of plain element-wise functions: the kernels of ``eager``, without its launches."""

    name = "breakable_unfused"
    summary = "breakable, with the plain element-wise functions of eager"
    how = Mode.BREAKABLE
    fused = False


class Full(ExecutionMode):
    """Replay one graph a bucket, attention included, for backends that can be captured."""

    name = "full"
    summary = "one graph a bucket, attention inside; for backends that declare it"

    _runner: PrefillRunner | None = None

    def unsupported(self, backend: AttentionBackend) -> str | None:
        """Ask the backend."""
        return backend.refuse_full_graph()

    def prepare(self, backend: AttentionBackend, label: str) -> ModeSetup:
        """Capture all buckets for ``backend``; the graphs of the backend before it are dropped."""
        if self._runner is not None:
            self._runner.release()
        self._runner = self.ground.new_runner(self.ground.model, full_graph=True)
        self._runner.use_backend(backend)
        return setup_of(self._runner.capture(), label, self.name)

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Replay the bucket's one graph."""
        assert self._runner is not None, "prepare() comes first"
        return run(self._runner, batch, Mode.BREAKABLE)


def run(runner: PrefillRunner, batch: PrefillBatch, mode: Mode) -> Prefilled:
    """Prefill ``batch`` with ``runner``, and say what served it."""
    result = runner.prefill(batch, mode=mode)
    bucket = result.admission.bucket
    served_by = result.admission.reason if bucket is None else f"bucket {bucket}"
    assert served_by is not None, "an admission has a bucket or a reason"
    return Prefilled(
        logits_BV=result.logits_BV,
        next_tokens_B=result.next_tokens_B,
        hidden_RD=result.hidden_RD,
        padded_tokens=result.padded_tokens,
        served_by=served_by if mode is Mode.BREAKABLE else mode.value,
    )


def setup_of(report: CaptureReport | None, label: str, mode: str) -> ModeSetup:
    """Describe a capture, or that there was none."""
    if report is None:
        return ModeSetup(backend=label, mode=mode)
    return ModeSetup(
        backend=label,
        mode=mode,
        warm_up_seconds=report.warm_up_seconds,
        capture_seconds=sum(bucket.seconds for bucket in report.buckets),
        graph_memory=report.memory_bytes,
        buckets=tuple(BucketRecord(**vars(bucket)) for bucket in report.buckets),
        failed=report.failed,
    )
