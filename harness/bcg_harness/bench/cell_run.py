"""Measure a group of modes on one workload: each is checked first, then all are timed in turn."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

import torch

from bcg_core import PagedKVCache, PrefillBatch
from bcg_core.errors import PASSED_ON
from bcg_harness.bench.arena import Scene
from bcg_harness.bench.cell import Cell, CheckSummary, Status
from bcg_harness.bench.mode import ExecutionMode, Prefilled
from bcg_harness.bench.modes import BASELINE
from bcg_harness.bench.reference import Expected, Reference, spoil
from bcg_harness.bench.spread import Speedup, Spread
from bcg_harness.bench.timing import Effort, StepTimes, interleave, require_device, run_once
from bcg_harness.bench.workloads import Workload
from bcg_harness.budgets import Comparison, worst
from bcg_harness.outcome import describe

_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class Checked:
    """Hold what the untimed, checked pass of a mode showed.

    Attributes:
        summary: the worst comparison.
        served: how often each bucket or reason served a timed batch.
        real_tokens: R of all timed batches.
        padded_tokens: T of all timed batches.
    """

    summary: CheckSummary | None = None
    served: dict[str, int] = field(default_factory=dict)
    real_tokens: int = 0
    padded_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Hold what a pass takes that nothing observes, once the results of the mode were found right.

    Attributes:
        seconds: latency of all timed batches.
        peak_memory: most device memory allocated; None on a CPU.
    """

    seconds: float
    peak_memory: int | None


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
        self._reference = reference
        self._kv_cache = kv_cache

    def measure(self, modes: Sequence[ExecutionMode], effort: Effort) -> list[Cell]:
        """Return a cell for each of ``modes``. Whatever one of them raises, or gets wrong, becomes its cell.

        Results are checked before the timed rounds and once more after them.
        """
        cells: dict[str, Cell] = {}
        checked = self._check_all(modes, cells)
        warm_ups = self._try_each(checked, self._warm_up, cells)
        if warm_ups:
            seconds = fmean(warm_up.seconds for warm_up in warm_ups.values())
            timed, raised = interleave(list(warm_ups), self._scenes, effort.rounds(seconds))
            cells |= {mode.name: self._broken(mode, error) for mode, error in raised.items()}
            wrong: dict[str, Cell] = {}
            for mode in self._check_all(list(timed), wrong):
                cells[mode.name] = self._cell(mode.name, checked[mode], warm_ups[mode], timed[mode])
            cells |= {
                name: replace(cell, reason=f"after its timed rounds: {cell.reason}")
                for name, cell in wrong.items()
            }
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

    def _try_each(
        self,
        modes: Iterable[ExecutionMode],
        attempt: Callable[[ExecutionMode], _Result | Cell],
        cells: dict[str, Cell],
    ) -> dict[ExecutionMode, _Result]:
        """Return what ``attempt`` gives for each mode; one that ends there, or raises, gets its cell in ``cells``."""
        results = {}
        for mode in modes:
            try:
                result = attempt(mode)
            except PASSED_ON:
                raise
            except BaseException as error:  # noqa: BLE001  # a mode's or a backend's, whatever it is
                result = self._broken(mode, error)
            if isinstance(result, Cell):
                cells[mode.name] = result
            else:
                results[mode] = result
        return results

    def _check_all(
        self, modes: Sequence[ExecutionMode], cells: dict[str, Cell]
    ) -> dict[ExecutionMode, Checked]:
        """Check each mode; what should have come out is dropped again, as it is no memory of theirs."""
        expected = self._reference.run(self._scenes)
        return self._try_each(modes, lambda mode: self._check(mode, expected), cells)

    def _check(self, mode: ExecutionMode, expected: Sequence[Expected]) -> Checked | Cell:
        """Run ``mode`` once and compare; returns the cell instead where it refuses or is wrong."""
        checked, comparisons = Checked(), list[Comparison]()

        def observe(step: int, batch: PrefillBatch, result: Prefilled) -> None:
            comparisons.append(expected[step].compare(result, self._reference.yardstick, step))
            checked.served[result.served_by] = checked.served.get(result.served_by, 0) + 1
            checked.real_tokens += batch.num_tokens
            checked.padded_tokens += result.padded_tokens

        refusals = (mode.refuses(scene.batch()) for scene in self.timed)
        if reason := next(filter(None, refusals), None):
            return self.without(mode.name, Status.UNAVAILABLE, reason)
        if not mode.own_attention:
            spoil(self._scenes, self._kv_cache)
        run_once(mode, self._scenes, observe)
        found = worst(comparisons)
        checked.summary = CheckSummary(error=found.error, budget=found.budget, what=found.what)
        if found.within:
            return checked
        reason = f"{found.what}: error {found.error:.2e} exceeds its budget {found.budget:.2e}"
        return self.without(mode.name, Status.FAILED, reason)

    def _broken(self, mode: ExecutionMode, error: BaseException) -> Cell:
        last = f"mode {mode.name!r} with backend {self._backend!r} on {self._workload.name!r}"
        require_device(mode.ground.device, last)
        return self.without(mode.name, Status.ERROR, describe(error))

    def _warm_up(self, mode: ExecutionMode) -> WarmUp:
        """Run ``mode`` once as it will be timed; tells how many rounds there is time for, and what memory they take."""
        device = mode.ground.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        times = run_once(mode, self._scenes)
        return WarmUp(
            seconds=sum(step.latency for step in times),
            peak_memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        )

    def _cell(
        self, mode: str, checked: Checked, warm_up: WarmUp, rounds: Sequence[Sequence[StepTimes]]
    ) -> Cell:
        latency = Spread.of([sum(step.latency for step in steps) for steps in rounds])
        waits = [
            self._workload.time_to_first_token([step.to_first_token for step in steps])
            for steps in rounds
        ]
        return Cell(
            backend=self._backend,
            mode=mode,
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
            peak_memory=warm_up.peak_memory,
        )

    def _with_speedups(self, cells: list[Cell]) -> list[Cell]:
        eager = next((cell.latency for cell in cells if cell.mode == BASELINE), None)
        return [
            replace(cell, speedup=Speedup.over(eager, cell.latency))
            if eager is not None and cell.latency is not None and cell.mode != BASELINE
            else cell
            for cell in cells
        ]
