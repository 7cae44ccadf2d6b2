"""What each bucket costs: padding, graph memory, time of its capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bcg_core import TokenBuckets
from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.setup import BucketRecord, ModeSetup
from bcg_harness.html.axis import token_axis
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.palette import ModeStyle
from bcg_harness.html.runs import CONTENDER
from bcg_harness.html.units import duration, percent, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 364, 220


def bucket_chart(report: BenchReport, styles: dict[str, ModeStyle]) -> Chart:
    """Return padding by bucket, and graph memory and capture time by bucket and mode."""
    setups = [setup for setup in report.setups if setup.buckets]
    ladder = ladder_of(report)
    padding = padding_by_bucket(report, ladder)
    panels = [
        _panel("Padding", partial(_draw_padding, ladder=ladder, padding=padding), _told(padding)),
        _panel(
            "Graph memory that it adds",
            partial(
                _draw_costs,
                setups=setups,
                styles=styles,
                cost=lambda b: b.memory_bytes / 2**20,
                unit="MiB",
            ),
            _totals(setups, lambda b: b.memory_bytes, size),
        ),
        _panel(
            "Time of its capture",
            partial(
                _draw_costs, setups=setups, styles=styles, cost=lambda b: b.seconds * 1e3, unit="ms"
            ),
            _totals(setups, lambda b: b.seconds, duration),
        ),
    ]
    captured = dict.fromkeys(setup.mode for setup in setups)
    return Chart(
        name="buckets",
        title="What each bucket costs",
        caption="Padding: dots are the rows that were computed for nothing in the batches of this run, the line is the "
        "most that a bucket can have. Memory and time: one line for each capture. It goes from the largest bucket to "
        "the smallest, and on a GPU the smaller ones reuse the memory of the largest.",
        panels=tuple(panels) if ladder else (),
        keys=(
            *(
                Key(
                    label=mode,
                    role=styles[mode].role,
                    glyph=styles[mode].glyph,
                    marker=styles[mode].marker,
                )
                for mode in captured
            ),
            Key(label="most padding possible", role="phase", glyph="━", marker="_"),
        ),
    )


def ladder_of(report: BenchReport) -> list[int]:
    """Return the buckets that breakable captured, or else those of the first mode that captured any, ascending."""
    captured = [setup for setup in report.setups if setup.buckets]
    captured.sort(key=lambda setup: setup.mode != CONTENDER)
    return sorted(bucket.bucket for bucket in captured[0].buckets) if captured else []


def padding_by_bucket(report: BenchReport, ladder: Sequence[int]) -> dict[int, float]:
    """Return padded rows as a fraction of all rows, over the batches of the run that each bucket serves."""
    if not ladder:
        return {}
    real: dict[int, list[int]] = {}
    buckets = TokenBuckets(ladder)
    for workload in report.workloads:
        for step in workload.steps:
            count = sum(new for _, new in step)
            if bucket := buckets.select(count).bucket:
                real.setdefault(bucket, []).append(count)
    return {
        bucket: 1 - sum(counts) / (bucket * len(counts)) for bucket, counts in sorted(real.items())
    }


def _panel(title: str, draw: Callable[[Area], None], words: str) -> Panel:
    alt = f"{title} of each bucket. {words}"
    return Panel(title=title, width=_WIDTH, height=_HEIGHT, draw=draw, alt=alt)


def _told(padding: dict[int, float]) -> str:
    return ", ".join(f"{bucket}: {percent(share)}" for bucket, share in padding.items())


def _totals(
    setups: list[ModeSetup],
    cost: Callable[[BucketRecord], float],
    tell: Callable[[float], str],
) -> str:
    return ", ".join(
        f"{setup.mode}{'' if setup.backend == NO_BACKEND else f' with {setup.backend}'}: "
        f"{tell(sum(map(cost, setup.buckets)))} in all"
        for setup in setups
    )


def _draw_padding(area: Area, *, ladder: list[int], padding: dict[int, float]) -> None:
    axes, ink = _bucket_axes(area, ladder, "%"), area.palette
    before = [0, *ladder[:-1]]
    most = [(1 - (low + 1) / high) * 100 for low, high in zip(before, ladder, strict=True)]
    axes.plot(ladder, most, color=ink["phase"], linewidth=1.5)
    shares = [share * 100 for share in padding.values()]
    axes.plot(list(padding), shares, "o", color=ink["mode-blue"], markersize=5.5, clip_on=False)
    axes.set_ylim(-4, 102)


def _draw_costs(
    area: Area,
    *,
    setups: list[ModeSetup],
    styles: dict[str, ModeStyle],
    cost: Callable[[BucketRecord], float],
    unit: str,
) -> None:
    ladder = sorted({bucket.bucket for setup in setups for bucket in setup.buckets})
    axes = _bucket_axes(area, ladder, unit)
    for setup in setups:
        style = styles[setup.mode]
        buckets = sorted(setup.buckets, key=lambda bucket: bucket.bucket)
        axes.plot(
            [bucket.bucket for bucket in buckets],
            [cost(bucket) for bucket in buckets],
            color=area.palette[style.role],
            linestyle=style.dash,
            linewidth=1.3,
            marker=style.marker,
            markersize=4,
            clip_on=False,
        )
    top = max(cost(bucket) for setup in setups for bucket in setup.buckets)
    axes.set_ylim(-0.04 * top, 1.08 * top or 1)


def _bucket_axes(area: Area, ladder: list[int], unit: str) -> Axes:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes = area.axes(left=54, right=16, top=10, bottom=44)
    token_axis(axes, ladder, area.palette, label="bucket, tokens", width=area.width - 70)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {unit}"))
    return axes
