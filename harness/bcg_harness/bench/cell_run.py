"""Measure a group of modes on one workload: each is checked first, then all are timed in turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from bcg_core import PagedKVCache, PrefillBatch
from bcg_harness.bench.arena import Scene
from bcg_harness.bench.mode import ExecutionMode, Prefilled
from bcg_harness.bench.modes import BASELINE
from bcg_harness.bench.record import Cell, CheckSummary, Status
from bcg_harness.bench.reference import Reference, spoil
from bcg_harness.bench.spread import Speedup, Spread
from bcg_harness.bench.timing import Effort, StepTimes, interleave, require_device, run_once
from bcg_harness.bench.workloads import Workload
from bcg_harness.budgets import Comparison, worst
from bcg_harness.outcome import describe


@dataclass(kw_only=True)
class Checked:
    """Hold what the untimed, checked pass of a mode showed.

    Attributes:
        mode: which was run.
        summary: the worst comparison.
        served: how often each bucket or reason served a timed batch.
        real_tokens: R of all timed batches.
        padded_tokens: T of all timed batches.
        peak_memory: most device memory allocated; None on a CPU.
    """

    mode: ExecutionMode
    summary: CheckSummary | None = None
    served: dict[str, int] = field(default_factory=dict)
    real_tokens: int = 0
    padded_tokens: int = 0
    peak_memory: int | None = None


class CellRun:
    """Measure modes that are prepared for one backend on the scenes of one workload.

    Raises DeviceLostError when one of them leaves the GPU unusable: nothing can be measured after that.

    Args:
        backend: label for the cells.
        workload: what the scenes are of.
        scenes: its steps.
        reference: gives what should come out.
        kv_cache: shared by all modes.

    Attributes:
        timed: the steps that are timed.
    """

    def __init__(
        self,
        backend: str,
        workload: Workload,
        scenes: Sequence[Scene],
        reference: Reference,
        kv_cache: PagedKVCache,
    ) -> None:
        self._backend = backend
        self._workload = workload
        self._scenes = scenes
        self.timed = [scene for scene in scenes if scene.timed]
        self._kv_cache = kv_cache
        self._expected = reference.run(scenes)
        self._yardstick = reference.yardstick

    def measure(self, modes: Sequence[ExecutionMode], effort: Effort) -> list[Cell]:
        """Return a cell for each of ``modes``. Whatever one of them raises, or gets wrong, becomes its cell."""
        cells: dict[str, Cell] = {}
        right: list[Checked] = []
        for mode in modes:
            found = self._check(mode)
            if isinstance(found, Cell):
                cells[mode.name] = found
            else:
                right.append(found)
        if right:
            try:
                timed = self._time([checked.mode for checked in right], effort)
            except Exception as error:  # noqa: BLE001  # a mode's or a backend's, whatever it is
                cells |= {c.mode.name: self._broken(c.mode, error) for c in right}
            else:
                cells |= {c.mode.name: self._cell(c, timed[c.mode.name]) for c in right}
        return self._with_speedups([cells[mode.name] for mode in modes])

    def without(self, mode: str, status: Status, reason: str) -> Cell:
        """Return the cell of a mode that has no measures, for ``reason``."""
        return Cell(
            backend=self._backend,
            mode=mode,
            workload=self._workload.name,
            status=status,
            reason=reason,
        )

    def _check(self, mode: ExecutionMode) -> Checked | Cell:
        """Run ``mode`` once and compare; returns the cell instead where it refuses, raises or is wrong."""
        checked, comparisons = Checked(mode=mode), list[Comparison]()

        def observe(step: int, batch: PrefillBatch, result: Prefilled) -> None:
            comparisons.append(self._expected[step].compare(result, self._yardstick, step))
            checked.served[result.served_by] = checked.served.get(result.served_by, 0) + 1
            checked.real_tokens += batch.num_tokens
            checked.padded_tokens += result.padded_tokens

        device = mode.ground.device
        try:
            refusals = (mode.refuses(scene.batch()) for scene in self.timed)
            if reason := next(filter(None, refusals), None):
                return self.without(mode.name, Status.UNAVAILABLE, reason)
            if not mode.own_attention:
                spoil(self._scenes, self._kv_cache)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            run_once(mode, self._scenes, observe)
            if device.type == "cuda":
                checked.peak_memory = torch.cuda.max_memory_allocated(device)
        except Exception as error:  # noqa: BLE001  # likewise
            return self._broken(mode, error)
        found = worst(comparisons)
        checked.summary = CheckSummary(error=found.error, budget=found.budget, what=found.what)
        if found.within:
            return checked
        reason = f"{found.what}: error {found.error:.2e} exceeds its budget {found.budget:.2e}"
        return self.without(mode.name, Status.FAILED, reason)

    def _broken(self, mode: ExecutionMode, error: Exception) -> Cell:
        last = f"mode {mode.name!r} with backend {self._backend!r} on {self._workload.name!r}"
        require_device(mode.ground.device, last)
        return self.without(mode.name, Status.ERROR, describe(error))

    def _time(
        self, modes: Sequence[ExecutionMode], effort: Effort
    ) -> dict[str, list[list[StepTimes]]]:
        """Warm up, which also tells how many rounds there is time for, and run the rounds."""
        passes = [sum(step.latency for step in run_once(mode, self._scenes)) for mode in modes]
        return interleave(modes, self._scenes, effort.rounds(sum(passes) / len(passes)))

    def _cell(self, checked: Checked, rounds: list[list[StepTimes]]) -> Cell:
        latency = Spread.of([sum(step.latency for step in steps) for steps in rounds])
        waits = [
            self._workload.time_to_first_token([step.to_first_token for step in steps])
            for steps in rounds
        ]
        return Cell(
            backend=self._backend,
            mode=checked.mode.name,
            workload=self._workload.name,
            status=Status.MEASURED,
            check=checked.summary,
            latency=latency,
            ttft=Spread.of([seconds for wait in waits for seconds in wait.values()]),
            enqueue=Spread.of([sum(step.enqueue for step in steps) for steps in rounds]),
            step_latency=tuple(
                Spread.of([step.latency for step in steps]).median
                for steps in zip(*rounds, strict=True)
            ),
            real_tokens=checked.real_tokens,
            padded_tokens=checked.padded_tokens,
            served=checked.served,
            peak_memory=checked.peak_memory,
        )

    def _with_speedups(self, cells: list[Cell]) -> list[Cell]:
        eager = next((cell.latency for cell in cells if cell.mode == BASELINE), None)
        return [
            replace(cell, speedup=Speedup.over(eager, cell.latency))
            if eager is not None and cell.latency is not None and cell.mode != BASELINE
            else cell
            for cell in cells
        ]
