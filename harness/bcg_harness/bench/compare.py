"""What two runs of the same model on the same hardware say: which medians moved, and which cells came or went."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bcg_harness.bench.cell import Cell, Status
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Speedup, Spread

THRESHOLD = 0.05
"""By what fraction a median may move before it is reported."""
MEASURES = ("latency", "ttft", "enqueue")
"""Measures of a cell that have a median."""

_SAME_HARDWARE = ("device", "hardware", "engine")
_SAME_SOFTWARE = ("driver", "cuda", "threads", "python", "platform")


@dataclass(frozen=True, kw_only=True)
class Move:
    """Hold a median in two runs.

    Attributes:
        backend: label.
        mode: name.
        workload: name.
        measure: one of ``MEASURES``.
        before: in the first run.
        after: in the second run.
        host: seconds by which the time that the host took to queue the work moved.
    """

    backend: str
    mode: str
    workload: str
    measure: str
    before: Spread
    after: Spread
    host: float

    @property
    def ratio(self) -> float:
        """Return the second median over the first: above 1 became slower."""
        return self.after.median / self.before.median

    @property
    def distance(self) -> float:
        """Return by what fraction of the first median the second is away from it."""
        return abs(self.ratio - 1)

    @property
    def cause(self) -> str:
        """Return which side took longer or shorter: "host" where at least half of the move is its, else "device"."""
        moved = self.after.median - self.before.median
        return "host" if moved and self.host / moved >= 1 / 2 else "device"

    @property
    def change(self) -> Speedup:
        """Return the second run as a speed-up over the first, with the verdict of the spreads."""
        return Speedup.over(self.before, self.after)

    def __str__(self) -> str:
        where = f"{self.mode}, {self.backend}, {self.workload}"
        return (
            f"{where}: {self.measure} {self.ratio:.2f} times the former "
            f"({self.before.median * 1e3:.3f} to {self.after.median * 1e3:.3f} ms; {self.change.verdict.value}; on the "
            f"{self.cause})"
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hold what became of all that two runs have in common.

    Attributes:
        medians: all medians that both runs have.
        threshold: by what fraction a median may move before it counts as moved.
        differences: what else differs between the runs: software and settings, in words.
        changed: cells whose status differs, in words.
    """

    medians: tuple[Move, ...]
    threshold: float
    differences: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def moved(self) -> list[Move]:
        """Return the medians that moved by more than the threshold, the farthest first."""
        far = [move for move in self.medians if move.distance > self.threshold]
        return sorted(far, key=lambda move: -move.distance)

    @property
    def summary(self) -> str:
        """Return the result in one sentence."""
        percent = f"{self.threshold:.0%}".replace("%", " %")
        if not self.medians:
            return "the runs have no median in common"
        if not self.moved:
            return f"no median moved by more than {percent} (of {len(self.medians)} compared)"
        slower = sum(move.ratio > 1 for move in self.moved)
        hosts = sum(move.cause == "host" for move in self.moved)
        return (
            f"{len(self.moved)} of {len(self.medians)} medians moved by more than {percent}: {slower} up (slower), "
            f"{len(self.moved) - slower} down (faster); {hosts} because the host took another time to queue the work, "
            f"{len(self.moved) - hosts} on the device"
        )


def comparable(before: BenchReport, after: BenchReport) -> bool:
    """Tell whether two runs measured the same model on the same hardware; software and settings may differ."""
    hardware = _pick(before.environment, _SAME_HARDWARE), _pick(after.environment, _SAME_HARDWARE)
    return dict(before.model) == dict(after.model) and hardware[0] == hardware[1]


def comparable_pairs(reports: Sequence[BenchReport]) -> Iterator[tuple[int, int]]:
    """Yield the indices of each run and of the last one before it that it is comparable with."""
    for after, report in enumerate(reports):
        before = (i for i in reversed(range(after)) if comparable(reports[i], report))
        if (found := next(before, None)) is not None:
            yield found, after


def compare_runs(
    before: BenchReport, after: BenchReport, *, threshold: float = THRESHOLD
) -> Comparison:
    """Compare all medians that ``before`` and ``after`` both have.

    Args:
        before: the run that is referred to.
        after: the run that is judged.
        threshold: by what fraction a median may move, in either direction.
    """
    former = {_key(cell): cell for cell in before.cells}
    latter = {_key(cell): cell for cell in after.cells}
    both = [(former[key], latter[key]) for key in former if key in latter]
    return Comparison(
        medians=tuple(move for pair in both for move in _moves(*pair)),
        threshold=threshold,
        differences=tuple(_differences(before, after)),
        changed=(
            *(_status_change(*pair) for pair in both if pair[0].status is not pair[1].status),
            *(f"{_name(cell)}: only in the first run" for key, cell in former.items() if key not in latter),
            *(f"{_name(cell)}: only in the second run" for key, cell in latter.items() if key not in former),
        ),
    )  # fmt: skip


def _key(cell: Cell) -> tuple[str, str, str]:
    return cell.backend, cell.mode, cell.workload


def _name(cell: Cell) -> str:
    return f"{cell.mode}, {cell.backend}, {cell.workload}"


def _moves(before: Cell, after: Cell) -> Iterator[Move]:
    host = 0.0
    if before.enqueue is not None and after.enqueue is not None:
        host = after.enqueue.median - before.enqueue.median
    for measure in MEASURES:
        spreads = getattr(before, measure), getattr(after, measure)
        if None not in spreads:
            yield Move(
                backend=before.backend,
                mode=before.mode,
                workload=before.workload,
                measure=measure,
                before=spreads[0],
                after=spreads[1],
                host=host,
            )


def _status_change(before: Cell, after: Cell) -> str:
    reason = after.reason if after.status is not Status.MEASURED else before.reason
    return f"{_name(before)}: {before.status.value}, then {after.status.value} ({reason})"


def _differences(before: BenchReport, after: BenchReport) -> Iterator[str]:
    sides = [
        {
            **_pick(report.environment, _SAME_SOFTWARE),
            **report.libraries,
            **report.settings,
        }
        for report in (before, after)
    ]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        old, new = (side.get(key, "nothing") for side in sides)
        if old != new:
            yield f"{key}: {old}, then {new}"


def _pick(mapping: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: mapping.get(key) for key in keys}
