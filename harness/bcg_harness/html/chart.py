"""Charts: panels that are drawn by one function each, in whatever figure they are put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bcg_harness.html.palette import Palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE_HEIGHT = 24
"""Pixels that the title of a panel takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Area:
    """Hold where in a figure a panel is drawn, in pixels from the upper left; a figure has 72 pixels an inch.

    Attributes:
        figure: all of it.
        palette: colours to draw in.
        left: of the area.
        top: of the area.
        width: of the area.
        height: of the area.
    """

    figure: Figure
    palette: Palette
    left: float
    top: float
    width: float
    height: float

    def axes(self, *, left: float = 0, right: float = 0, top: float = 0, bottom: float = 0) -> Axes:
        """Return axes with these margins within the area, with nothing but a quiet grid."""
        ink = self.palette
        width, height = self.figure.get_size_inches() * 72
        axes = self.figure.add_axes(
            (
                (self.left + left) / width,
                1 - (self.top + self.height - bottom) / height,
                (self.width - left - right) / width,
                (self.height - top - bottom) / height,
            ),
            facecolor="none",
        )
        axes.spines[:].set_visible(False)
        axes.tick_params(which="both", length=0, labelsize=10.5, labelcolor=ink["muted"], pad=5)
        axes.grid(visible=True, color=ink["line"], linewidth=0.8)
        axes.set_axisbelow(True)
        return axes

    def pixel_axes(self) -> Axes:
        """Return axes over the whole area whose coordinates are pixels from its upper left."""
        axes = self.axes()
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.set_axis_off()
        return axes


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """Describe one drawing.

    Attributes:
        title: above it; may be empty.
        width: in pixels.
        height: in pixels, the title not counted.
        draw: draws it into an area.
        alt: what it shows, for those who cannot see it.
        scrolls: keep the width on a narrow screen and scroll, in place of getting smaller.
    """

    title: str
    width: float
    height: float
    draw: Callable[[Area], None]
    alt: str
    scrolls: bool = False

    @property
    def full_height(self) -> float:
        """Return the height in pixels with the title."""
        return self.height + (TITLE_HEIGHT if self.title else 0)

    def draw_into(self, area: Area) -> None:
        """Draw the title and what stands below it."""
        below = area.height - self.height
        if self.title:
            axes = area.pixel_axes()
            axes.text(
                0,
                13,
                self.title,
                fontsize=12.5,
                fontweight="bold",
                color=area.palette["text"],
                parse_math=False,
            )
        self.draw(
            Area(
                figure=area.figure,
                palette=area.palette,
                left=area.left,
                top=area.top + below,
                width=self.width,
                height=self.height,
            )
        )


@dataclass(frozen=True, kw_only=True)
class Key:
    """Explain one colour of a chart.

    Attributes:
        label: what it stands for.
        role: of the colour.
        glyph: that it is shown with.
        marker: the same, as matplotlib calls it.
        hollow: only its outline is drawn.
    """

    label: str
    role: str
    glyph: str = "■"
    marker: str = "s"
    hollow: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """Hold the panels that are read together.

    Attributes:
        name: of its PNG.
        title: above all panels.
        caption: how to read it.
        panels: in order; charts without any are not shown.
        keys: what the colours mean.
        columns: panels beside each other in the PNG; the page takes as many as fit.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    keys: tuple[Key, ...] = ()
    columns: int = 3
