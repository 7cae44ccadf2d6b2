"""Where the time of one replay went: what the host launches above what the device runs, and where it waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bcg_harness.bench.profiling import union_length
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.timeline import Span, Timeline
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.units import duration, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 1120, 148
_LEFT, _RIGHT = 62, 24
_ZOOMED_LAYERS = 3
_INK = {"mode-blue": "on-bar", "break": "on-break", "phase": "text"}
"""Colours of texts in bars."""
_HEIGHTS = {"mode-blue": 0.86, "break": 0.66, "phase": 0.46, "kernel": 0.86, "gap": 0.3}
"""Of bars, where a lane has 1: what a bar is does not rest on its colour alone."""
_LETTER = 6.6
_KEYS = (
    Key(label="segment: one graph launch", role="mode-blue"),
    Key(label="break: attention is launched", role="break"),
    Key(label="rest of the host's work", role="phase"),
    Key(label="kernel or copy on the device", role="kernel"),
    Key(label="the device waits", role="gap"),
)


def timeline_charts(report: BenchReport) -> list[Chart]:
    """Return a chart for each time line: the whole replay, and a few layers from its middle."""
    return [
        Chart(
            name=f"timeline-{number}",
            title=f"One {timeline.mode} prefill of {timeline.workload} with {timeline.backend}",
            caption=_in_words(timeline),
            panels=tuple(_panels(timeline)),
            keys=_KEYS,
            columns=1,
        )
        for number, timeline in enumerate(report.timelines, start=1)
        if timeline.spans
    ]


def idle_gaps(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return (start, end) of the times between two spans in which none of them ran."""
    gaps: list[tuple[float, float]] = []
    reached: float | None = None
    for start, end in sorted((span.start, _end(span)) for span in spans):
        if reached is not None and start > reached:
            gaps.append((reached, start))
        reached = end if reached is None else max(reached, end)
    return gaps


def _end(span: Span) -> float:
    return span.start + span.seconds


def _lane(timeline: Timeline, lane: str) -> list[Span]:
    return [span for span in timeline.spans if span.lane == lane]


def _role(span: Span) -> str:
    if span.lane == "device":
        return "kernel"
    kinds = {"segment": "mode-blue", "break": "break"}
    return kinds.get(span.name.partition(" ")[0], "phase")


def _in_words(timeline: Timeline) -> str:
    host, device = _lane(timeline, "host"), _lane(timeline, "device")
    segments = [span for span in host if _role(span) == "mode-blue"]
    breaks = [span for span in host if _role(span) == "break"]
    words = [
        f"The host spends {duration(sum(s.seconds for s in segments))} on launching {len(segments)} segments and "
        f"{duration(sum(s.seconds for s in breaks))} in {len(breaks)} breaks."
    ]
    if device:
        total = max(map(_end, device)) - min(span.start for span in device)
        busy = union_length((span.start, _end(span)) for span in device)
        gaps = idle_gaps(device)
        longest = max((end - start for start, end in gaps), default=0.0)
        words.append(
            f"From its first kernel to its last the device takes {duration(total)} and is busy for "
            f"{duration(busy)} of it ({percent(busy / total if total else 0)}); its longest wait is "
            f"{duration(longest)}."
        )
    else:
        words.append("What the device did was not recorded.")
    words.append(
        "Seen by the profiler, which makes the host slower than in the timed rounds. Bars of segments are the tallest, "
        "then come breaks, then the rest; where the device waits, its bar is thin."
    )
    return " ".join(words)


def _panels(timeline: Timeline) -> Iterator[Panel]:
    whole = 0.0, max(map(_end, timeline.spans))
    windows = {"The whole replay": whole}
    if (zoom := _zoom(timeline)) is not None:
        windows[f"{_ZOOMED_LAYERS} layers from its middle"] = zoom
    for title, window in windows.items():
        yield Panel(
            title=title,
            width=_WIDTH,
            height=_HEIGHT,
            draw=partial(_draw, timeline=timeline, window=window),
            alt=f"Time line of {timeline.backend} on {timeline.workload}, {title}. {_in_words(timeline)}",
            scrolls=True,
        )


def _zoom(timeline: Timeline) -> tuple[float, float] | None:
    """Return from the start of a segment in the middle to the start of one a few layers on."""
    starts = sorted(s.start for s in _lane(timeline, "host") if s.name.startswith("segment"))
    if len(starts) <= 2 * _ZOOMED_LAYERS:
        return None
    first = len(starts) // 2 - 1
    return starts[first], starts[first + _ZOOMED_LAYERS]


def _draw(area: Area, *, timeline: Timeline, window: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ink = area.palette
    axes = area.axes(left=_LEFT, right=_RIGHT, top=4, bottom=28)
    start, end = window
    axes.set_xlim(start, end)
    axes.set_ylim(2.02, -0.02)
    axes.set_yticks([0.45, 1.5], labels=["host", "device"], color=ink["text"], fontsize=11.5)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e3:g} ms"))
    pixel = (end - start) / (_WIDTH - _LEFT - _RIGHT)
    host, device = _lane(timeline, "host"), _lane(timeline, "device")
    for role in ("phase", "break", "mode-blue"):
        bars = [(s.start, _end(s)) for s in host if _role(s) == role]
        _bars(area, axes, bars, window, pixel, middle=0.49, role=role)
    _bars(area, axes, idle_gaps(device), window, pixel, middle=1.49, role="gap")
    running = [(s.start, _end(s)) for s in device]
    _bars(area, axes, running, window, pixel, middle=1.49, role="kernel")
    _names(area, axes, host, window, pixel)


def _bars(
    area: Area,
    axes: Axes,
    bars: Sequence[tuple[float, float]],
    window: tuple[float, float],
    pixel: float,
    *,
    middle: float,
    role: str,
) -> None:
    """Draw all ``bars`` as one path: thousands of rectangles would make the page heavy."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    top, bottom = middle - _HEIGHTS[role] / 2, middle + _HEIGHTS[role] / 2
    boxes = [
        Path(
            [(a, top), (b, top), (b, bottom), (a, bottom), (a, top)],
            [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY],
        )
        for a, b in _visible(bars, window, pixel)
    ]
    if boxes:
        shape = Path.make_compound_path(*boxes)
        axes.add_patch(PathPatch(shape, facecolor=area.palette[role], linewidth=0))


def _visible(
    bars: Sequence[tuple[float, float]], window: tuple[float, float], pixel: float
) -> list[tuple[float, float]]:
    """Cut ``bars`` to the window, and join those that are less than a quarter of a pixel apart."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(bars):
        start, end = max(start, window[0]), min(end, window[1])
        if end <= start:
            continue
        if joined and start - joined[-1][1] < pixel / 4:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _names(
    area: Area, axes: Axes, spans: list[Span], window: tuple[float, float], pixel: float
) -> None:
    """Write into bars of the host what they are, where there is room."""
    for span in spans:
        start, end = max(span.start, window[0]), min(_end(span), window[1])
        room = (end - start) / pixel
        text = span.name if len(span.name) * _LETTER + 8 < room else span.name.rpartition(" ")[2]
        if len(text) * _LETTER + 3 > room or not text:
            continue
        axes.text(
            (start + end) / 2,
            0.49,
            text,
            ha="center",
            va="center_baseline",
            fontsize=10.5,
            color=area.palette[_INK[_role(span)]],
            parse_math=False,
        )
