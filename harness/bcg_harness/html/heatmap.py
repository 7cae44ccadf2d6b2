"""The speed-up of breakable over eager: a row a backend, a column a workload."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Speedup, Verdict
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.palette import HEAT_STEPS, heat_step
from bcg_harness.html.runs import (
    BASELINE,
    CONTENDER,
    all_fallbacks,
    fallbacks,
    other_workloads,
    real_backends,
    single_prompts,
)
from bcg_harness.html.units import short_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELL_WIDTH, _CELL_HEIGHT, _SEAM = 58, 32, 2
_FRAMED = Key(label="ran without a graph", role="muted", glyph="□", hollow=True)
_LETTER = 6.7
"""Pixels that a letter of a label takes at most, on average."""


@dataclass(frozen=True, kw_only=True)
class _Tile:
    speedup: Speedup | None = None
    graphless: bool = False

    @property
    def close(self) -> bool:
        return self.speedup is not None and self.speedup.verdict is Verdict.TOO_CLOSE

    @property
    def text(self) -> str:
        if self.speedup is None:
            return "n/a"
        number = f"{'≈' if self.close else ''}{self.speedup.ratio:.2f}"
        return f"({number})" if self.graphless else number


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
    graphless = all_fallbacks(report, (cell for cell in report.cells if cell.mode == CONTENDER))
    return Chart(
        name="speedup",
        title=f"Speed-up of {CONTENDER} over {BASELINE}",
        caption="Above 1 is faster. ≈ marks what is too close to call: the interquartile ranges overlap. Hatched: not "
        "measured, with the reason in the list of gaps below the full table."
        f"{f' In brackets, framed, without colour: ran without a graph: {graphless}.' if graphless else ''}",
        panels=tuple(panels),
        keys=(
            *(Key(label=_class_label(step), role=f"heat-{step}") for step in range(10)),
            *([_FRAMED] if graphless else []),
        ),
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
    tiles = [[_tile(report, backend, workload) for workload in workloads] for backend in backends]
    slanted = any(len(label) * _LETTER > _CELL_WIDTH for label in labels)
    head = 20 + 0.72 * _LETTER * max(map(len, labels)) if slanted else 26.0
    left = 14 + _LETTER * max(map(len, backends))
    overhang = 0.72 * _LETTER * len(labels[-1]) if slanted else 0
    return Panel(
        title=title,
        width=max(8.5 * len(title), left + _CELL_WIDTH * len(labels) + max(8, overhang - 21)),
        height=head + _CELL_HEIGHT * len(backends) + 4,
        draw=partial(
            _draw, tiles=tiles, rows=backends, labels=labels, left=left, head=head, slanted=slanted
        ),
        alt=f"Speed-up of breakable over eager. {title}. {_in_words(tiles, backends, labels)}",
        scrolls=True,
    )


def _tile(report: BenchReport, backend: str, workload: WorkloadRecord) -> _Tile:
    cell = report.cell(backend, CONTENDER, workload.name)
    if cell is None:
        return _Tile()
    return _Tile(speedup=cell.speedup, graphless=bool(fallbacks(report, cell)))


def _in_words(tiles: list[list[_Tile]], rows: list[str], labels: list[str]) -> str:
    return " ".join(
        f"{row}: {', '.join(f'{label} {tile.text}' for label, tile in zip(labels, line, strict=True))}."
        for row, line in zip(rows, tiles, strict=True)
    )


def _draw(
    area: Area,
    *,
    tiles: list[list[_Tile]],
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
        for column, tile in enumerate(tiles[row]):
            _draw_tile(area, axes, tile, left + column * _CELL_WIDTH, head + row * _CELL_HEIGHT)


def _draw_tile(area: Area, axes: Axes, tile: _Tile, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    ink = area.palette
    # An outline is drawn half outside of its box.
    inset = 1 if tile.graphless else 0
    box = {
        "xy": (x + inset, y + inset),
        "width": _CELL_WIDTH - _SEAM - 2 * inset,
        "height": _CELL_HEIGHT - _SEAM - 2 * inset,
    }
    if tile.speedup is None:
        hatched = {"hatch": "////", "edgecolor": ink["line"], "linewidth": 0}
        axes.add_patch(Rectangle(**box, facecolor=ink["panel"], **hatched))
        return
    step = 4 if tile.close or tile.graphless else heat_step(tile.speedup.ratio)
    if tile.graphless:
        framed = {"edgecolor": ink["muted"], "linestyle": "--", "linewidth": 1}
        axes.add_patch(Rectangle(**box, facecolor=ink["paper"], **framed))
    else:
        axes.add_patch(Rectangle(**box, facecolor=ink[f"heat-{step}"], linewidth=0))
    axes.text(
        x + (_CELL_WIDTH - _SEAM) / 2,
        y + (_CELL_HEIGHT - _SEAM) / 2,
        tile.text,
        ha="center",
        va="center_baseline",
        fontsize=12,
        fontstyle="italic" if tile.close else "normal",
        color=ink[f"on-heat-{step}"],
        parse_math=False,
    )
