"""The answer in words and a few numbers: what breakable gives over eager on small, medium and large workloads."""

from collections.abc import Sequence
from dataclasses import dataclass

from bcg_harness.bench.cell import Cell
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Speedup, Verdict
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.html.runs import (
    BASELINE,
    CONTENDER,
    all_fallbacks,
    fallbacks,
    latency_of,
    other_workloads,
    real_backends,
    single_prompts,
)
from bcg_harness.html.units import NOTHING, duration, listed, ratio, whole

_SIZES = ("small", "medium", "large")
_ADVERBS = {Verdict.FASTER: "faster", Verdict.SLOWER: "slower", Verdict.TOO_CLOSE: "too close to call"}  # fmt: skip
_CLASSES = {Verdict.FASTER: "good", Verdict.SLOWER: "bad", Verdict.TOO_CLOSE: "close"}


@dataclass(frozen=True, kw_only=True)
class Score:
    """Hold one speed-up of a backend.

    Attributes:
        size: "small", "medium" or "large".
        workload: in words.
        ratio: such as 2.31×, or a dash.
        verdict: in words, or why there is none.
        verdict_class: of the style sheet.
        times: of eager and breakable.
    """

    size: str
    workload: str
    ratio: str
    verdict: str
    verdict_class: str
    times: str = ""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """Hold the summary of a run.

    Attributes:
        sentences: one for each size.
        scores: by backend, one for each size.
        left_out: which workloads say nothing of breakable, since it ran them without a graph; may be empty.
    """

    sentences: tuple[str, ...]
    scores: dict[str, tuple[Score, ...]]
    left_out: str


def headline(report: BenchReport) -> Headline:
    """Return the summary; without sentences and scores where no replay of breakable was measured against eager.

    What breakable ran without a graph is no replay.
    """
    chosen = _choose(report)
    backends = [
        backend
        for backend in real_backends(report)
        if any(report.cell(backend, CONTENDER, workload.name) for workload in chosen.values())
    ]
    return Headline(
        sentences=tuple(_sentence(report, workload, backends) for workload in chosen.values()),
        scores={
            backend: tuple(
                _score(report, backend, size, workload) for size, workload in chosen.items()
            )
            for backend in backends
        },
        left_out=_left_out(report),
    )


def verdict_class(verdict: Verdict) -> str:
    """Return the class of the style sheet that shows ``verdict``."""
    return _CLASSES[verdict]


def _choose(report: BenchReport) -> dict[str, WorkloadRecord]:
    """Return the smallest, the geometrically middle and the largest workload with a speed-up, by size."""
    singles = _with_speedup(report, single_prompts(report))
    others = sorted(_with_speedup(report, other_workloads(report)), key=lambda w: w.real_tokens)
    known = singles or others
    if len(known) < 3:
        sizes = {0: (), 1: ("small",), 2: ("small", "large")}[len(known)]
        return dict(zip(sizes, known, strict=True))
    middle = (known[0].real_tokens * known[-1].real_tokens) ** 0.5
    inner = known[1:-1]
    medium = min(inner, key=lambda w: max(w.real_tokens / middle, middle / w.real_tokens))
    return dict(zip(_SIZES, (known[0], medium, known[-1]), strict=True))


def _with_speedup(report: BenchReport, workloads: Sequence[WorkloadRecord]) -> list[WorkloadRecord]:
    contenders = (cell for cell in report.cells if cell.mode == CONTENDER)
    compared = {c.workload for c in contenders if _replay_speedup(report, c) is not None}
    return [workload for workload in workloads if workload.name in compared]


def _replay_speedup(report: BenchReport, cell: Cell | None) -> Speedup | None:
    """Return the speed-up of a cell whose batches were all replayed; None for any other."""
    return None if cell is None or fallbacks(report, cell) else cell.speedup


def _left_out(report: BenchReport) -> str:
    cells = [c for c in report.cells if c.mode == CONTENDER and fallbacks(report, c)]
    names = {cell.workload for cell in cells}
    workloads = [workload for workload in report.workloads if workload.name in names]
    if not workloads:
        return ""
    places = listed([_place(workload, report) for workload in workloads])
    why = all_fallbacks(report, cells)
    return f"Left out: {places}, where {CONTENDER} ran batches without a graph: {why}."


def _place(workload: WorkloadRecord, report: BenchReport) -> str:
    if workload in single_prompts(report):
        return f"{whole(workload.real_tokens)} tokens"
    return workload.name


def _sentence(report: BenchReport, workload: WorkloadRecord, backends: list[str]) -> str:
    ratios: dict[Verdict, list[tuple[float, str]]] = {}
    for backend in backends:
        speedup = _replay_speedup(report, report.cell(backend, CONTENDER, workload.name))
        if speedup is not None:
            ratios.setdefault(speedup.verdict, []).append((speedup.ratio, backend))
    total = sum(map(len, ratios.values()))
    parts = [
        f"{_ADVERBS[verdict]} with {_who([name for _, name in ratios[verdict]], total)} "
        f"({_range([value for value, _ in ratios[verdict]])})"
        for verdict in Verdict
        if verdict in ratios
    ]
    return f"{_place(workload, report)}: compared with {BASELINE}, {CONTENDER} is {listed(parts)}."


def _who(names: list[str], total: int) -> str:
    if len(names) == total and total > 1:
        return f"all {total} backends"
    return listed(names) if len(names) <= 2 else f"{len(names)} of {total} backends"


def _range(ratios: list[float]) -> str:
    low, high = ratio(min(ratios)), ratio(max(ratios))
    return low if low == high else f"{low} to {high}"


def _score(report: BenchReport, backend: str, size: str, workload: WorkloadRecord) -> Score:
    cell = report.cell(backend, CONTENDER, workload.name)
    place = _place(workload, report)
    if cell is None or cell.speedup is None:
        why = "not measured" if cell is None else cell.status.value
        return Score(size=size, workload=place, ratio=NOTHING, verdict=why, verdict_class="close")
    if fallbacks(report, cell):
        why = "ran without a graph"
        return Score(size=size, workload=place, ratio=NOTHING, verdict=why, verdict_class="close")
    return Score(
        size=size,
        workload=place,
        ratio=ratio(cell.speedup.ratio),
        verdict=_ADVERBS[cell.speedup.verdict],
        verdict_class=verdict_class(cell.speedup.verdict),
        times=_times(report.cell(backend, BASELINE, workload.name), cell),
    )


def _times(baseline: Cell | None, cell: Cell) -> str:
    before, after = latency_of(baseline), latency_of(cell)
    if before is None or after is None:
        return ""
    first, second = duration(before.median), duration(after.median)
    number, unit = first.split()
    return f"{number if second.endswith(f' {unit}') else first} → {second}"
