"""Runners and an engine with one fault each, to prove that the checks find it.

Shape letters: R real tokens, T bucket (padded) tokens.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch

from bcg_core import (
    Admission,
    CPUSegmentEngine,
    ForwardContext,
    Mode,
    ModelSpec,
    Phase,
    PrefillBatch,
    PrefillResult,
    PrefillRunner,
    Segment,
    SegmentEngine,
    StaticInputs,
    Workspace,
)


class _ForgetfulWorkspace(Workspace):
    def __init__(self, spec: ModelSpec, max_tokens: int, forgets: Collection[str]) -> None:
        super().__init__(spec, max_tokens)
        self._forgets = forgets

    def load(self, batch: PrefillBatch, inputs: StaticInputs) -> None:
        """Load, and put back what was in the padded rows before."""
        tails = [getattr(inputs, name)[batch.num_tokens :] for name in self._forgets]
        before = [tail.clone() for tail in tails]
        super().load(batch, inputs)
        for tail, stale in zip(tails, before, strict=True):
            tail.copy_(stale)


class ForgetsPaddedInputs(PrefillRunner):
    """Leave the ids, positions and slots of an earlier, longer batch in the padded rows."""

    forgets: ClassVar[Collection[str]] = ("input_ids_T", "positions_T", "slot_mapping_T")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.workspace = _ForgetfulWorkspace(self.model.spec, self.buckets[-1], self.forgets)


class ForgetsPaddedIds(ForgetsPaddedInputs):
    """Leave the token ids of an earlier, longer batch in the padded rows."""

    forgets = ("input_ids_T",)


class ForgetsPaddedPositions(ForgetsPaddedInputs):
    """Leave the positions of an earlier, longer batch in the padded rows."""

    forgets = ("positions_T",)


class ForgetsPaddedSlots(ForgetsPaddedInputs):
    """Leave the KV slots of an earlier, longer batch in the padded rows."""

    forgets = ("slot_mapping_T",)


class _UnclearedContext(ForwardContext):
    def bind(self, batch: PrefillBatch, backend: Any, metadata: Any) -> None:
        """Bind, but leave the padded rows of the output as they were."""
        padded = self.io.out_TX[batch.num_tokens :].clone()
        super().bind(batch, backend, metadata)
        self.io.out_TX[batch.num_tokens :].copy_(padded)


class ForgetsPaddedOutput(PrefillRunner):
    """Leave the attention output of padded rows unwritten."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context = _UnclearedContext(self.kv_cache)


class FreezesSlots(PrefillRunner):
    """Record the KV write with a slot mapping of its own, which replays do not refresh."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots_M = torch.zeros(
            self.buckets[-1], dtype=torch.int64, device=self.model.spec.device
        )

    def _begin(self, phase: Phase, workspace: Workspace, inputs: StaticInputs) -> None:
        if phase is Phase.CAPTURE:
            slots_T = self._slots_M[: len(inputs.slot_mapping_T)]
            inputs = replace(inputs, slot_mapping_T=slots_T)
        super()._begin(phase, workspace, inputs)


class PretendsToReplay(PrefillRunner):
    """Run eagerly and report a replay."""

    def prefill(self, batch: PrefillBatch, **kwargs: Any) -> PrefillResult:
        """Run eagerly whatever was asked for."""
        if kwargs.get("mode", Mode.BREAKABLE) is not Mode.BREAKABLE:
            return super().prefill(batch, **kwargs)
        admission = self.admit(batch)
        result = super().prefill(batch, mode=Mode.PADDED_EAGER)
        if admission.bucket is not None:
            self.stats.replays[admission.bucket] += 1
        return replace(result, admission=admission)


class FallsBackSilently(PrefillRunner):
    """Run everything eagerly."""

    def admit(self, batch: PrefillBatch) -> Admission:
        """Admit to no bucket."""
        return Admission.eager("not today")


class SamplesWrongRow(PrefillRunner):
    """Compute the logits of each request's first token."""

    def prefill(self, batch: PrefillBatch, **kwargs: Any) -> PrefillResult:
        """Prefill, then take the wrong rows."""
        result = super().prefill(batch, **kwargs)
        with torch.inference_mode():
            logits_BV = self.model.compute_logits(result.hidden_RD[list(batch.cu_new_lens[:-1])])
        return replace(result, logits_BV=logits_BV)


class KeepsResults(PrefillRunner):
    """Keep every result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._results: list[PrefillResult] = []

    def prefill(self, batch: PrefillBatch, **kwargs: Any) -> PrefillResult:
        """Prefill, and remember."""
        self._results.append(super().prefill(batch, **kwargs))
        return self._results[-1]


class TiresOfReplay(PrefillRunner):
    """Run batches eagerly from the hundredth replay on."""

    def admit(self, batch: PrefillBatch) -> Admission:
        """Admit to no bucket when there have been enough."""
        if self.stats.replays.total() >= 100:
            return Admission.eager("enough for today")
        return super().admit(batch)


class RunsPythonAgain(PrefillRunner):
    """Replay with an engine that runs the model's Python again each time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["engine"] = RerunningEngine(self._forward_again)
        super().__init__(*args, **kwargs)

    def _forward_again(self) -> None:
        inputs = self.workspace.inputs(self.context.io.out_TX.shape[0])
        self.model.forward(inputs.input_ids_T, inputs.positions_T, self.context)


class RerunningEngine(SegmentEngine):
    """Record on the CPU, and call ``python`` before the first segment of every replay."""

    def __init__(self, python: Callable[[], None]) -> None:
        self._python = python
        self._inner = CPUSegmentEngine()
        self._first = True

    @property
    def device(self) -> torch.device:
        """Return the CPU."""
        return self._inner.device

    def capturing(self) -> AbstractContextManager[None]:
        """Delegate; the next segment is the first."""
        self._first = True
        return self._inner.capturing()

    def warming_up(self) -> AbstractContextManager[None]:
        """Delegate."""
        return self._inner.warming_up()

    def begin(self) -> None:
        """Delegate."""
        self._inner.begin()

    def end(self) -> Segment:
        """Return a segment that runs Python, if it is the first."""
        segment: Segment = self._inner.end()
        if not self._first:
            return segment
        self._first = False
        return _PythonSegment(self._python, segment)

    def abort(self) -> None:
        """Delegate."""
        self._inner.abort()

    def holds(self, addresses: Collection[int]) -> set[int]:
        """Delegate."""
        return self._inner.holds(addresses)

    def memory_bytes(self) -> int:
        """Delegate."""
        return self._inner.memory_bytes()


class _PythonSegment:
    def __init__(self, python: Callable[[], None], segment: Segment) -> None:
        self._python = python
        self._segment = segment

    def replay(self) -> None:
        """Run Python, then the segment."""
        self._python()
        self._segment.replay()
