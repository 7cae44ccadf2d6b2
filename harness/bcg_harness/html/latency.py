"""Latency against tokens: a panel a backend, a line a mode, the interquartile range as a band."""

from __future__ import annotations

from functools import partial

from bcg_harness.bench.record import NO_BACKEND, BenchReport
from bcg_harness.bench.spread import Spread
from bcg_harness.html.axis import time_axis, token_axis
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.palette import ModeStyle
from bcg_harness.html.runs import latencies, real_backends, single_prompts
from bcg_harness.html.units import duration

_WIDTH, _HEIGHT = 364, 262
Points = list[tuple[int, Spread]]
"""Tokens and latency, by tokens."""


def latency_chart(report: BenchReport, styles: dict[str, ModeStyle]) -> Chart:
    """Return latency over the tokens of single prompts; modes with attention of their own stand in every panel."""
    backends = real_backends(report) or [NO_BACKEND]
    by_backend = {backend: _lines(report, backend) for backend in backends}
    by_backend = {backend: lines for backend, lines in by_backend.items() if any(lines.values())}
    spreads = [s for lines in by_backend.values() for points in lines.values() for _, s in points]
    drawn = {mode for lines in by_backend.values() for mode, points in lines.items() if points}
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
        "interquartile range; where there is none to be seen, it is thinner than the line.",
        panels=tuple(panels),
        keys=tuple(
            Key(label=mode, role=style.role, glyph=style.glyph, marker=style.marker)
            for mode, style in styles.items()
            if mode in drawn
        ),
    )


def _lines(report: BenchReport, backend: str) -> dict[str, Points]:
    workloads = single_prompts(report)
    lines = {mode: list(latencies(report, backend, mode, workloads)) for mode in report.modes()}
    for mode, points in lines.items():
        points += [] if points else latencies(report, NO_BACKEND, mode, workloads)
    return lines


def _in_words(lines: dict[str, Points]) -> str:
    return "; ".join(
        f"{mode} {duration(points[0][1].median)} at {points[0][0]} and {duration(points[-1][1].median)} at "
        f"{points[-1][0]} tokens"
        for mode, points in lines.items()
        if points
    )


def _draw(
    area: Area,
    *,
    lines: dict[str, Points],
    styles: dict[str, ModeStyle],
    limits: tuple[float, float],
) -> None:
    ink = area.palette
    axes = area.axes(left=54, right=14, top=6, bottom=44)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    token_axis(axes, sizes, ink, label="tokens", width=area.width - 68)
    time_axis(axes.yaxis, limits)
    # The mode that all is about comes last, on top.
    for mode in sorted(lines, key=lambda name: name == "breakable"):
        style, points = styles[mode], lines[mode]
        xs = [size for size, _ in points]
        colour = ink[style.role]
        lower, upper = [s.q1 for _, s in points], [s.q3 for _, s in points]
        axes.fill_between(xs, lower, upper, color=colour, alpha=0.22, linewidth=0)
        axes.plot(
            xs,
            [spread.median for _, spread in points],
            color=colour,
            linestyle=style.dash,
            linewidth=2.2 if mode == "breakable" else 1.5,
            marker=style.marker,
            markersize=5.5,
            markeredgecolor=ink["paper"],
            markeredgewidth=0.6,
        )
