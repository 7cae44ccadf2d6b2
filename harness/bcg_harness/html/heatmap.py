"""The speed-up of breakable over eager: a row a backend, a column a workload."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bcg_harness.bench.record import BenchReport, Cell, WorkloadRecord
from bcg_harness.bench.spread import Verdict
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.palette import HEAT_STEPS, heat_step
from bcg_harness.html.runs import (
    BASELINE,
    CONTENDER,
    other_workloads,
    real_backends,
    single_prompts,
)
from bcg_harness.html.units import short_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELL_WIDTH, _CELL_HEIGHT, _SEAM = 58, 32, 2
_LETTER = 6.7
"""Pixels that a letter of a label takes at most, on average."""


def heat_map(report: BenchReport) -> Chart:
    """Return the speed-ups over single prompts, and over all other workloads."""
    singles, others = single_prompts(report), other_workloads(report)
    tokens = [short_tokens(workload.real_tokens) for workload in singles]
    names = [workload.name for workload in others]
    panels = [
        _panel(report, title, workloads, labels)
        for title, workloads, labels in (
            ("One prompt, by tokens", singles, tokens),
            ("Several requests, prefixes, chunks", others, names),
        )
        if workloads and real_backends(report)
    ]
    return Chart(
        name="speedup",
        title=f"Speed-up of {CONTENDER} over {BASELINE}",
        caption="Above 1 is faster. ≈ marks what is too close to call: the interquartile ranges overlap. Hatched: not "
        "measured, with the reason in the list of gaps below the full table.",
        panels=tuple(panels),
        keys=tuple(Key(label=_class_label(step), role=f"heat-{step}") for step in range(10)),
        columns=1,
    )


def _class_label(step: int) -> str:
    if step == 0:
        return f"below {HEAT_STEPS[0]:g}×"
    if step == len(HEAT_STEPS):
        return f"{HEAT_STEPS[-1]:g}× and more"
    return f"{HEAT_STEPS[step - 1]:g}–{HEAT_STEPS[step]:g}"


def _panel(
    report: BenchReport, title: str, workloads: list[WorkloadRecord], labels: list[str]
) -> Panel:
    backends = real_backends(report)
    cells = [[report.cell(b, CONTENDER, w.name) for w in workloads] for b in backends]
    slanted = any(len(label) * _LETTER > _CELL_WIDTH for label in labels)
    head = 20 + 0.72 * _LETTER * max(map(len, labels)) if slanted else 26.0
    left = 14 + _LETTER * max(map(len, backends))
    overhang = 0.72 * _LETTER * len(labels[-1]) if slanted else 0
    return Panel(
        title=title,
        width=max(8.5 * len(title), left + _CELL_WIDTH * len(labels) + max(8, overhang - 21)),
        height=head + _CELL_HEIGHT * len(backends) + 4,
        draw=partial(
            _draw, cells=cells, rows=backends, labels=labels, left=left, head=head, slanted=slanted
        ),
        alt=f"Speed-up of breakable over eager. {title}. {_in_words(cells, backends, labels)}",
        scrolls=True,
    )


def _in_words(cells: list[list[Cell | None]], rows: list[str], labels: list[str]) -> str:
    return " ".join(
        f"{row}: {', '.join(f'{label} {_text(cell)}' for label, cell in zip(labels, line, strict=True))}."
        for row, line in zip(rows, cells, strict=True)
    )


def _text(cell: Cell | None) -> str:
    if cell is None or cell.speedup is None:
        return "n/a"
    number = f"{cell.speedup.ratio:.2f}"
    return f"≈{number}" if cell.speedup.verdict is Verdict.TOO_CLOSE else number


def _draw(
    area: Area,
    *,
    cells: list[list[Cell | None]],
    rows: list[str],
    labels: list[str],
    left: float,
    head: float,
    slanted: bool,
) -> None:
    axes, ink = area.pixel_axes(), area.palette
    small = {"fontsize": 11, "color": ink["muted"], "parse_math": False}
    for column, label in enumerate(labels):
        x = left + (column + 0.5) * _CELL_WIDTH
        if slanted:
            axes.text(
                x - 4, head - 6, label, rotation=45, ha="left", rotation_mode="anchor", **small
            )
        else:
            axes.text(x, head - 8, label, ha="center", **small)
    for row, backend in enumerate(rows):
        y = head + (row + 0.5) * _CELL_HEIGHT
        text = {"fontsize": 11.5, "color": ink["text"], "parse_math": False}
        axes.text(left - 10, y, backend, ha="right", va="center_baseline", **text)
        for column, cell in enumerate(cells[row]):
            _draw_cell(area, axes, cell, left + column * _CELL_WIDTH, head + row * _CELL_HEIGHT)


def _draw_cell(area: Area, axes: Axes, cell: Cell | None, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    ink = area.palette
    box = {"xy": (x, y), "width": _CELL_WIDTH - _SEAM, "height": _CELL_HEIGHT - _SEAM}
    if cell is None or cell.speedup is None:
        hatched = {"hatch": "////", "edgecolor": ink["line"], "linewidth": 0}
        axes.add_patch(Rectangle(**box, facecolor=ink["panel"], **hatched))
        return
    close = cell.speedup.verdict is Verdict.TOO_CLOSE
    step = 4 if close else heat_step(cell.speedup.ratio)
    axes.add_patch(Rectangle(**box, facecolor=ink[f"heat-{step}"], linewidth=0))
    axes.text(
        x + (_CELL_WIDTH - _SEAM) / 2,
        y + (_CELL_HEIGHT - _SEAM) / 2,
        _text(cell),
        ha="center",
        va="center_baseline",
        fontsize=12,
        fontstyle="italic" if close else "normal",
        color=ink[f"on-heat-{step}"],
        parse_math=False,
    )
