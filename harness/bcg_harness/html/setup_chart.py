"""What it takes to make each mode ready: warm-up and capture, apart."""

from __future__ import annotations

from functools import partial

from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.html.axis import time_axis
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.palette import ModeStyle
from bcg_harness.html.units import duration

_WIDTH, _ROW = 740, 30


def setup_chart(report: BenchReport, styles: dict[str, ModeStyle]) -> Chart:
    """Return warm-up and capture time by mode, a dot for each backend; times of zero have none."""
    by_mode: dict[str, list[ModeSetup]] = {}
    order = list(styles)
    for setup in sorted(report.setups, key=lambda setup: order.index(setup.mode)):
        if setup.warm_up_seconds or setup.capture_seconds:
            by_mode.setdefault(setup.mode, []).append(setup)
    panel = Panel(
        title="",
        width=_WIDTH,
        height=_ROW * len(by_mode) + 44,
        draw=partial(_draw, by_mode=by_mode, styles=styles),
        alt=f"Warm-up and capture time of each mode. {_in_words(by_mode)}",
        scrolls=True,
    )
    return Chart(
        name="setup",
        title="What it takes to be ready",
        caption="Once a process; logarithmic. A dot for each backend that the mode is made ready for, and one where "
        "one capture serves all backends. Capture is the time of all buckets together; warm-up is what comes before "
        "it: compilation and first calls.",
        panels=(panel,) if by_mode else (),
        keys=(
            Key(label="warm-up", role="muted", glyph="○", marker="o", hollow=True),
            Key(label="capture", role="text", glyph="●", marker="o"),
        ),
        columns=1,
    )


def _in_words(by_mode: dict[str, list[ModeSetup]]) -> str:
    return "; ".join(
        f"{mode}: warm-up at most {duration(max(s.warm_up_seconds for s in setups))}, capture at most "
        f"{duration(max(s.capture_seconds for s in setups))}"
        for mode, setups in by_mode.items()
    )


def _draw(area: Area, *, by_mode: dict[str, list[ModeSetup]], styles: dict[str, ModeStyle]) -> None:
    ink = area.palette
    axes = area.axes(left=140, right=24, top=4, bottom=38)
    axes.set_xscale("log")
    axes.set_ylim(len(by_mode) - 0.5, -0.5)
    axes.set_yticks(
        range(len(by_mode)),
        labels=list(by_mode),
        color=ink["text"],
        fontsize=11.5,
        parse_math=False,
    )
    for row, (mode, setups) in enumerate(by_mode.items()):
        colour = ink[styles[mode].role]
        warm_ups = [s.warm_up_seconds for s in setups if s.warm_up_seconds]
        captures = [s.capture_seconds for s in setups if s.capture_seconds]
        dot = {"markersize": 8, "markeredgewidth": 1.6, "markeredgecolor": colour}
        axes.plot(warm_ups, [row] * len(warm_ups), "o", markerfacecolor=ink["paper"], **dot)
        axes.plot(captures, [row] * len(captures), "o", markerfacecolor=colour, **dot)
    all_setups = [setup for setups in by_mode.values() for setup in setups]
    seconds = [s for setup in all_setups for s in (setup.warm_up_seconds, setup.capture_seconds)]
    limits = min(filter(None, seconds)) / 2, max(seconds) * 2
    axes.set_xlim(*limits)
    time_axis(axes.xaxis, limits)
