"""Run one case with one backend, step by step, and yield what the checks find.

Shape letters: R real tokens, D model dim.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bcg_core import Mode, PrefillBatch
from bcg_harness.budgets import Measured, compare, worst
from bcg_harness.cases import Case, Step
from bcg_harness.checks import CHECK_NAMES, CHECKS, ONE_PASS, StepRecord
from bcg_harness.companions import Companions
from bcg_harness.full_graph import FullReplay
from bcg_harness.interleaving import interleave
from bcg_harness.oracle import HiddenOracle
from bcg_harness.outcome import Finding
from bcg_harness.probe import Probe
from bcg_harness.sharp_logits import measure_sharp
from bcg_harness.stage import Stage
from bcg_harness.tokens import TokenSource


class CaseRun:
    """Hold the state of a case while it runs.

    Args:
        case: what to run.
        stage: where to run it.
        probe: the backend.
        oracle: knows the right hidden states; None when no check needs them.
        source: gives the token ids.
        checks: names of the checks to make.
        companions: what some checks need besides the backend; None when none of these is made.

    Attributes:
        position: index of the step at hand, for messages.
    """

    def __init__(
        self,
        case: Case,
        stage: Stage,
        probe: Probe,
        oracle: HiddenOracle | None,
        source: TokenSource,
        checks: Collection[str] = CHECK_NAMES,
        companions: Companions | None = None,
    ) -> None:
        self.case = case
        self.position = 0
        self._stage = stage
        self._probe = probe
        self._oracle = oracle
        self._source = source
        self._checks = checks
        self._companions = companions
        self._hidden: defaultdict[int, list[Tensor]] = defaultdict(list)

    def findings(self, seed: int) -> Iterator[tuple[int | None, Finding]]:
        """Run all steps on a cache that is refilled with garbage; yields (step or None for the case, finding)."""
        self._stage.reset(seed, nan=self._probe.capabilities.ignores_foreign_nan)
        for position, step in enumerate(self.case.steps):
            self.position = position
            batch = self._stage.batch(step, self._source)
            if not step.checked:
                self._stage.run(batch, Mode.BREAKABLE, self._probe)
                continue
            for finding in self.check(step, batch):
                yield position, finding
        whole = self._one_pass()
        if whole is not None:
            yield None, whole

    def check(self, step: Step, batch: PrefillBatch) -> Iterator[Finding]:
        """Run all arms of ``step``, which ``batch`` was made of, on the cache as it is; yields what the checks find."""
        record = self._record(step, batch)
        for name, check in CHECKS.items():
            finding = check.judge(record) if name in self._checks else None
            if finding is not None:
                yield finding
        self._remember(record)

    @torch.inference_mode()  # as in a runner: what a backend prepares inside, it may not change outside
    def _record(self, step: Step, batch: PrefillBatch) -> StepRecord:
        """Run all arms of a step; the cache is left as the undisturbed replay leaves it."""
        stage, storage = self._stage, self._stage.kv_cache.storage_L2PSKH
        before, made = storage.clone(), _copy_of(batch)
        raw = judged = interleaving = None
        sharp: tuple[Measured, ...] = ()
        if "raw_shape" in self._checks:
            raw = stage.run(batch, Mode.EAGER, self._probe)
            storage.copy_(before)
        padded = stage.run(batch, Mode.PADDED_EAGER, self._probe)
        kv_padded = storage.clone()
        if batch.num_requests and "attention" in self._checks:
            sharp = measure_sharp(stage, batch, self._probe.inner)
        companions = self._companions
        if batch.num_requests and companions and "interleaved" in self._checks:
            interleaving = interleave(stage, batch, self._probe.inner, lambda: companions.twin)
        storage.copy_(before)
        full = self._full(batch)
        storage.copy_(before)
        if "attention" in self._checks:
            judged = stage.run(batch, Mode.BREAKABLE, self._probe, judge=True)
            storage.copy_(before)
        replay = stage.run(batch, Mode.BREAKABLE, self._probe, delay=True)
        return StepRecord(
            step=step,
            batch=batch,
            made=made,
            expected=self._expected(step, batch),
            low=() if self._oracle is None else tuple(map(self._oracle.low_errors, batch.new_lens)),
            bucket=stage.expected_bucket(batch),
            capabilities=self._probe.capabilities,
            model=stage.model,
            runner=stage.runner,
            raw=raw,
            padded=padded,
            judged=judged,
            replay=replay,
            sharp=sharp,
            interleaving=interleaving,
            full=full,
            kv_before=before,
            kv_padded=kv_padded,
            kv_replay=storage,
        )

    def _full(self, batch: PrefillBatch) -> FullReplay | None:
        """Replay a full graph, for a backend that declares that it can be captured; leaves the cache as that does."""
        companions, bucket = self._companions, self._stage.expected_bucket(batch)
        asked = "full_graph" in self._checks and self._probe.capabilities.supports_full_graph
        if not asked or companions is None or bucket is None:
            return None
        return companions.full_graphs.replay(batch, bucket)

    def _expected(self, step: Step, batch: PrefillBatch) -> tuple[Tensor, ...]:
        oracle = self._oracle
        if oracle is None or not {"oracle", "full_graph"} & set(self._checks):
            return ()
        spans = zip(step.requests, batch.prefix_lens, batch.kv_lens, strict=True)
        return tuple(oracle.hidden(sequence, start, stop) for (sequence, _), start, stop in spans)

    def _remember(self, record: StepRecord) -> None:
        parts = record.replay.hidden_RD.split(record.batch.new_lens) if record.step.requests else ()
        for (sequence, _), hidden_RD in zip(record.step.requests, parts, strict=True):
            self._hidden[sequence].append(hidden_RD)

    def _one_pass(self) -> Finding | None:
        """Compare requests that came in several checked chunks, from their first token on, with one pass."""
        oracle, comparisons = self._oracle, []
        if oracle is None or ONE_PASS not in self._checks:
            return None
        for sequence, chunks in self._hidden.items():
            hidden_RD = torch.cat(chunks)
            if len(chunks) < 2 or len(hidden_RD) != self.case.lengths[sequence]:
                continue
            comparisons.append(
                compare(
                    hidden_RD,
                    oracle.hidden(sequence, 0, len(hidden_RD)),
                    low=oracle.low_errors(len(hidden_RD)),
                    what=f"sequence {sequence} in {len(chunks)} chunks",
                    position=0,
                )
            )
        return Finding.of(ONE_PASS, worst(comparisons)) if comparisons else None


def _copy_of(batch: PrefillBatch) -> PrefillBatch:
    """Return a batch with host arrays of its own, whose device arrays are made from these when somebody asks."""
    return replace(
        batch,
        input_ids_R=batch.input_ids_R.clone(),
        positions_R=batch.positions_R.clone(),
        slot_mapping_R=batch.slot_mapping_R.clone(),
        page_table_BW=batch.page_table_BW.clone(),
    )
