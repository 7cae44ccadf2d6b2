"""Measure a group of modes on one workload: each is checked first, then all are timed in turn."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

import torch

from bcg_core import PagedKVCache, PrefillBatch
from bcg_core.errors import PASSED_ON
from bcg_harness.bench.arena import Arena, Scene
from bcg_harness.bench.cell import Cell, CheckSummary, Status
from bcg_harness.bench.mode import ExecutionMode, Prefilled
from bcg_harness.bench.modes import BASELINE
from bcg_harness.bench.reference import Expected, Reference, spoil
from bcg_harness.bench.spread import Speedup, Spread
from bcg_harness.bench.timing import Effort, StepTimes, interleave, require_device, run_once
from bcg_harness.bench.workloads import Workload
from bcg_harness.budgets import Comparison, worst
from bcg_harness.outcome import describe
from bcg_harness.progress import Progress

_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class Checked:
    """Hold what untimed, checked passes of a mode showed.

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

    def add(self, other: "Checked") -> None:
        """Add those of another stretch."""
        assert other.summary is not None
        if self.summary is None or other.summary.load > self.summary.load:
            self.summary = other.summary
        for served_by, count in other.served.items():
            self.served[served_by] = self.served.get(served_by, 0) + count
        self.real_tokens += other.real_tokens
        self.padded_tokens += other.padded_tokens


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Hold what a pass takes that nothing observes, once the results of the mode were found right.

    Attributes:
        seconds: latency of all timed batches.
        peak_memory: most device memory allocated; None on a CPU.
    """

    seconds: float
    peak_memory: int | None


@dataclass(kw_only=True)
class Passed:
    """Hold what was measured of a mode on the stretches so far.

    Attributes:
        checked: what its checked passes showed.
        rounds: times of all timed steps, round by round.
        peak_memory: most device memory allocated; None on a CPU.
    """

    checked: Checked = field(default_factory=Checked)
    rounds: list[list[StepTimes]] = field(default_factory=list)
    peak_memory: int | None = None

    def add(self, checked: Checked, warm_up: WarmUp, rounds: Sequence[Sequence[StepTimes]]) -> None:
        """Add what was measured on another stretch, in as many rounds."""
        self.checked.add(checked)
        if warm_up.peak_memory is not None:
            self.peak_memory = max(warm_up.peak_memory, self.peak_memory or 0)
        if not self.rounds:
            self.rounds = [[] for _ in rounds]
        for steps, more in zip(self.rounds, rounds, strict=True):
            steps += more


class CellRun:
    """Measure modes that are prepared for one backend on one workload, stretch by stretch.

    Raises DeviceLostError when one of them leaves the GPU unusable: nothing can be measured after that.

    Args:
        backend: label for the cells.
        workload: what is prefilled.
        arena: gives its scenes.
        reference: gives what should come out.
        kv_cache: shared by all modes.
        progress: told of each stretch.
    """

    def __init__(
        self,
        backend: str,
        workload: Workload,
        arena: Arena,
        reference: Reference,
        kv_cache: PagedKVCache,
        progress: Progress,
    ) -> None:
        self._backend = backend
        self._workload = workload
        self._arena = arena
        self._reference = reference
        self._kv_cache = kv_cache
        self._progress = progress
        self._scenes: Sequence[Scene] = ()
        self._steps_before = 0

    @property
    def timed(self) -> list[Scene]:
        """Return the timed steps of the stretch at hand: those of the last one, when all was measured."""
        return [scene for scene in self._scenes if scene.timed]

    def measure(self, modes: Sequence[ExecutionMode], effort: Effort) -> list[Cell]:
        """Return a cell for each of ``modes``. Whatever one of them raises, or gets wrong, becomes its cell.

        Results are checked before the timed rounds of a stretch and once more after them.
        """
        cells: dict[str, Cell] = {}
        passed = {mode: Passed() for mode in modes}
        self._steps_before, rounds = 0, None
        for scenes in self._arena.enter(self._workload):
            self._scenes = scenes
            rounds = self._measure_stretch(passed, cells, effort, rounds)
            self._steps_before += len(self.timed)
            self._progress.advance()
        cells |= {mode.name: self._cell(mode.name, found) for mode, found in passed.items()}
        return self._with_speedups([cells[mode.name] for mode in modes])

    def _measure_stretch(
        self,
        passed: dict[ExecutionMode, Passed],
        cells: dict[str, Cell],
        effort: Effort,
        rounds: int | None,
    ) -> int | None:
        """Add to what ``passed``; a mode that does no more gets its cell. Returns ``rounds``, chosen if None."""
        checked = self._check_all(list(passed), cells)
        warm_ups = self._try_each(checked, self._warm_up, cells)
        right: dict[ExecutionMode, Checked] = {}
        if warm_ups:
            if rounds is None:
                seconds = fmean(warm_up.seconds for warm_up in warm_ups.values())
                rounds = effort.rounds(seconds / self._share())
            timed, raised = interleave(list(warm_ups), self._scenes, rounds)
            cells |= {mode.name: self._broken(mode, error) for mode, error in raised.items()}
            wrong: dict[str, Cell] = {}
            right = self._check_all(list(timed), wrong)
            cells |= {
                name: replace(cell, reason=f"after its timed rounds: {cell.reason}")
                for name, cell in wrong.items()
            }
        for mode in list(passed):
            if mode in right:
                passed[mode].add(checked[mode], warm_ups[mode], timed[mode])
            else:
                del passed[mode]
        return rounds

    def _share(self) -> float:
        """Return the part of the workload's timed tokens that the stretch at hand has."""
        own = sum(len(request.token_ids) for scene in self.timed for request in scene.requests)
        return own / sum(self._workload.batch_tokens())

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
        if not modes:
            return {}
        expected = self._reference.run(self._scenes)
        return self._try_each(modes, lambda mode: self._check(mode, expected), cells)

    def _check(self, mode: ExecutionMode, expected: Sequence[Expected]) -> Checked | Cell:
        """Run ``mode`` once and compare; returns the cell instead where it refuses or is wrong."""
        checked, comparisons = Checked(), list[Comparison]()

        def observe(step: int, batch: PrefillBatch, result: Prefilled) -> None:
            number = self._steps_before + step
            comparisons.append(expected[step].compare(result, self._reference.yardstick, number))
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

    def _cell(self, mode: str, passed: Passed) -> Cell:
        checked, rounds = passed.checked, passed.rounds
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
            peak_memory=passed.peak_memory,
        )

    def _with_speedups(self, cells: list[Cell]) -> list[Cell]:
        eager = next((cell.latency for cell in cells if cell.mode == BASELINE), None)
        return [
            replace(cell, speedup=Speedup.over(eager, cell.latency))
            if eager is not None and cell.latency is not None and cell.mode != BASELINE
            else cell
            for cell in cells
        ]
