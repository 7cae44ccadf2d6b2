"""Axes of token counts and of times: round labels that do not touch each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2
from typing import TYPE_CHECKING

from bcg_harness.html.palette import Palette
from bcg_harness.html.units import short_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_LABEL_WIDTH = 26
_MARGIN = 1.2
"""By what factor the axis goes on beyond its first and its last token count."""


def token_axis(
    axes: Axes, sizes: Sequence[int], palette: Palette, *, label: str, width: float
) -> None:
    """Make the x axis logarithmic, with ticks at those of ascending ``sizes`` that ``width`` pixels have room for."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / _MARGIN, sizes[-1] * _MARGIN)
    axes.xaxis.set_major_locator(FixedLocator(list(_spaced(sizes, width))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_tokens(round(value))))
    axes.set_xlabel(label, fontsize=10.5, color=palette["muted"], labelpad=4)


def time_axis(axis: Axis, limits: tuple[float, float]) -> None:
    """Put ticks on a logarithmic axis of seconds; each decade gets one, or three where decades are few."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    digits = (1, 2, 5) if limits[1] / limits[0] < 1e4 else (1,)
    axis.set_major_locator(FixedLocator(list(_round_times(*limits, digits))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _spaced(sizes: Sequence[int], width: float) -> Iterator[int]:
    """Yield those of ``sizes``, from the largest down, whose labels do not touch; powers of two, if there are some."""
    powers = [size for size in sizes if size & (size - 1) == 0]
    shown = powers if len(powers) > 2 else sizes
    octaves = log2(sizes[-1] / sizes[0] * _MARGIN**2)
    last = float("inf")
    for size in reversed(shown):
        x = log2(size / sizes[0]) / octaves * width
        if last - x >= _LABEL_WIDTH:
            last = x
            yield size


def _round_times(low: float, high: float, digits: Sequence[int]) -> Iterator[float]:
    for exponent in range(-9, 6):
        times = (digit * 10.0**exponent for digit in digits)
        yield from (time for time in times if low <= time <= high)


def _plain(seconds: float) -> str:
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 999:
            return f"{seconds * factor:g} {unit}"
    return f"{seconds:g} s"
