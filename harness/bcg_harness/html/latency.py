"""Latency against tokens: a panel a backend, a line a mode, the interquartile range as a band."""

from __future__ import annotations

from functools import partial

from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.record import BenchReport
from bcg_harness.html.axis import time_axis, token_axis
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.palette import ModeStyle
from bcg_harness.html.runs import Point, all_fallbacks, latencies, real_backends, single_prompts
from bcg_harness.html.units import duration

_WIDTH, _HEIGHT = 364, 262
_OPEN = Key(label="ran without a graph", role="muted", glyph="○", marker="o", hollow=True)


def latency_chart(report: BenchReport, styles: dict[str, ModeStyle]) -> Chart:
    """Return latency over the tokens of single prompts; modes with attention of their own stand in every panel."""
    backends = real_backends(report) or [NO_BACKEND]
    by_backend = {backend: _lines(report, backend) for backend in backends}
    by_backend = {backend: lines for backend, lines in by_backend.items() if any(lines.values())}
    points = [point for lines in by_backend.values() for line in lines.values() for point in line]
    spreads = [point.latency for point in points]
    drawn = {mode for lines in by_backend.values() for mode, line in lines.items() if line}
    panels = [
        Panel(
            title=backend,
            width=_WIDTH,
            height=_HEIGHT,
            draw=partial(
                _draw,
                lines=lines,
                styles=styles,
                limits=(min(s.q1 for s in spreads) / 1.25, max(s.q3 for s in spreads) * 1.25),
            ),
            alt=f"Latency against tokens with {backend}: {_in_words(lines)}",
        )
        for backend, lines in by_backend.items()
    ]
    return Chart(
        name="latency",
        title="Latency of one prompt, by its tokens",
        caption="Median of the synchronised wall clock, both axes logarithmic, all panels alike. The band is the "
        "interquartile range; where there is none to be seen, it is thinner than the line."
        f"{_graphless(report)}",
        panels=tuple(panels),
        keys=(
            *(
                Key(label=mode, role=style.role, glyph=style.glyph, marker=style.marker)
                for mode, style in styles.items()
                if mode in drawn
            ),
            *([_OPEN] if any(point.graphless for point in points) else []),
        ),
    )


def _graphless(report: BenchReport) -> str:
    names = {workload.name for workload in single_prompts(report)}
    why = all_fallbacks(report, (cell for cell in report.cells if cell.workload in names))
    return f" Open markers: ran without a graph: {why}." if why else ""


def _lines(report: BenchReport, backend: str) -> dict[str, list[Point]]:
    workloads = single_prompts(report)
    lines = {mode: list(latencies(report, backend, mode, workloads)) for mode in report.modes()}
    for mode, points in lines.items():
        points += [] if points else latencies(report, NO_BACKEND, mode, workloads)
    return lines


def _in_words(lines: dict[str, list[Point]]) -> str:
    return "; ".join(
        f"{mode} {_point_in_words(points[0])} and {_point_in_words(points[-1])} tokens"
        for mode, points in lines.items()
        if points
    )


def _point_in_words(point: Point) -> str:
    graph = " (without a graph)" if point.graphless else ""
    return f"{duration(point.latency.median)}{graph} at {point.tokens}"


def _draw(
    area: Area,
    *,
    lines: dict[str, list[Point]],
    styles: dict[str, ModeStyle],
    limits: tuple[float, float],
) -> None:
    ink = area.palette
    axes = area.axes(left=54, right=14, top=6, bottom=44)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    sizes = sorted({point.tokens for points in lines.values() for point in points})
    token_axis(axes, sizes, ink, label="tokens", width=area.width - 68)
    time_axis(axes.yaxis, limits)
    # The mode that all is about comes last, on top.
    for mode in sorted(lines, key=lambda name: name == "breakable"):
        style, points = styles[mode], lines[mode]
        xs = [point.tokens for point in points]
        colour = ink[style.role]
        lower, upper = [p.latency.q1 for p in points], [p.latency.q3 for p in points]
        axes.fill_between(xs, lower, upper, color=colour, alpha=0.22, linewidth=0)
        axes.plot(
            xs,
            [point.latency.median for point in points],
            color=colour,
            linestyle=style.dash,
            linewidth=2.2 if mode == "breakable" else 1.5,
            marker=style.marker,
            markersize=5.5,
            markeredgecolor=ink["paper"],
            markeredgewidth=0.6,
        )
        without = [point for point in points if point.graphless]
        axes.plot(
            [point.tokens for point in without],
            [point.latency.median for point in without],
            color=colour,
            linestyle="none",
            marker=style.marker,
            markersize=6,
            markerfacecolor=ink["paper"],
            markeredgewidth=1.3,
        )
