"""Charts as inline SVG and as PNG. matplotlib is used without pyplot; its settings are put back after each drawing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from bcg_harness.errors import HarnessError
from bcg_harness.html.chart import Area, Chart, Key, Panel
from bcg_harness.html.palette import PAGE, Palette, use_variables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARGIN = 28
_GAP = 28
_LINE = 24
_SHARPNESS = 2
_SMALL_LETTER = 5.7
"""Pixels that a letter of small text is wide, on average."""


def panel_svg(panel: Panel, *, salt: str) -> str:
    """Return ``panel`` as an SVG element for a page whose style sheet defines the colours.

    Args:
        panel: to be drawn.
        salt: differs between all drawings of a page, so that what they define does not collide.
    """
    with _settings(salt):
        figure = _figure(panel.width, panel.full_height)
        panel.draw_into(_area(figure, PAGE, panel))
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    return _embeddable(text.getvalue(), panel)


def chart_png(chart: Chart, palette: Palette, path: Path, *, context: str) -> None:
    """Write ``chart`` to ``path``, with title, legend and the ``context`` that its numbers belong to.

    Raises HarnessError where the file cannot be written.
    """
    columns = min(chart.columns, len(chart.panels))
    rows = [chart.panels[at : at + columns] for at in range(0, len(chart.panels), columns)]
    widest = max(sum(panel.width for panel in row) + _GAP * (len(row) - 1) for row in rows)
    width = max(widest, 560) + 2 * _MARGIN
    key_rows = _wrap_keys(chart.keys, width - 2 * _MARGIN)
    lines = wrap(context, int((width - 2 * _MARGIN) / _SMALL_LETTER))
    top = _MARGIN + 30.0 + _LINE * len(key_rows) + 12
    heights = [max(panel.full_height for panel in row) for row in rows]
    height = top + sum(heights) + _GAP * len(rows) + 8 + 16 * len(lines)
    with _settings(chart.name):
        figure = _figure(width, height)
        figure.set_facecolor(palette["paper"])
        _write_texts(figure, chart, key_rows, palette, lines)
        for row, row_height in zip(rows, heights, strict=True):
            left = float(_MARGIN)
            for panel in row:
                panel.draw_into(_area(figure, palette, panel, left=left, top=top))
                left += panel.width + _GAP
            top += row_height + _GAP
        try:
            figure.savefig(path, format="png", dpi=72 * _SHARPNESS)
        except OSError as error:
            raise HarnessError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def _settings(salt: str) -> Iterator[None]:
    import matplotlib

    # Texts stay texts, which are small and can be selected, and the same input gives the same file.
    ours = {"svg.fonttype": "none", "svg.hashsalt": salt, "hatch.linewidth": 0.8}
    theirs = matplotlib.rcParamsDefault.items()  # not those of the user's matplotlibrc
    plain = {key: value for key, value in theirs if not key.startswith("backend")}
    with matplotlib.rc_context({**plain, **ours}):
        yield


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasAgg(figure)
    return figure


def _area(
    figure: Figure, palette: Palette, panel: Panel, *, left: float = 0, top: float = 0
) -> Area:
    return Area(
        figure=figure,
        palette=palette,
        left=left,
        top=top,
        width=panel.width,
        height=panel.full_height,
    )


def _write_texts(
    figure: Figure, chart: Chart, key_rows: list[list[Key]], palette: Palette, lines: list[str]
) -> None:
    width, height = figure.get_size_inches() * 72
    whole = Area(figure=figure, palette=palette, left=0, top=0, width=width, height=height)
    axes = whole.pixel_axes()
    title = {"fontsize": 16, "fontweight": "bold", "parse_math": False}
    axes.text(_MARGIN, _MARGIN + 12, chart.title, color=palette["text"], **title)
    y = _MARGIN + 38
    for row in key_rows:
        x = float(_MARGIN)
        for key in row:
            inside = palette["paper" if key.hollow else key.role]
            marker = {"markersize": 8, "markerfacecolor": inside, "markeredgewidth": 1.4}
            axes.plot(x + 5, y - 4, key.marker, color=palette[key.role], **marker)
            axes.text(x + 17, y, key.label, fontsize=11.5, color=palette["text"], parse_math=False)
            x += _key_width(key)
        y += _LINE
    small = {"fontsize": 10, "parse_math": False}
    for number, line in enumerate(reversed(lines)):
        axes.text(_MARGIN, height - 16 - 16 * number, line, color=palette["muted"], **small)


def _key_width(key: Key) -> float:
    return 44 + 7.2 * len(key.label)


def _wrap_keys(keys: tuple[Key, ...], width: float) -> list[list[Key]]:
    rows: list[list[Key]] = []
    room = 0.0
    for key in keys:
        if _key_width(key) > room:
            rows.append([])
            room = width
        rows[-1].append(key)
        room -= _key_width(key)
    return rows


_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def _embeddable(svg: str, panel: Panel) -> str:
    svg = svg[svg.index("<svg") :]
    # Its style sheet would apply to the whole page, which has one of its own.
    svg = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#(\w+)", svg))
    svg = re.sub(r"<[^>]+>", lambda tag: _shorten(tag[0], used), svg)
    svg = re.sub(r">\s+<", "><", svg)
    head = (
        f'<svg viewBox="0 0 {panel.width:g} {panel.full_height:g}" width="{panel.width:g}" '
        f'height="{panel.full_height:g}" role="img" aria-label="{escape(panel.alt)}">'
    )
    return use_variables(head + svg[svg.index(">") + 1 :].strip())


def _shorten(tag: str, used: set[str]) -> str:
    tag = re.sub(r' id="([^"]*)"', lambda name: name[0] if name[1] in used else "", tag)
    tag = re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), tag)
    return re.sub(r"\s+", " ", tag).replace("xlink:href", "href")
