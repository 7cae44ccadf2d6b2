"""The colours of pages and charts: roles that have a value by day and by night, told apart without red and green."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

HEAT_STEPS = (0.5, 0.67, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 3.0)
"""Speed-ups at which the heat map takes its next colour."""


@dataclass(frozen=True, kw_only=True)
class Palette:
    """Give each role its colour.

    Attributes:
        name: "light", "dark", or "page" for colours that stand for variables of the style sheet.
        colours: by role, as ``#rrggbb``.
    """

    name: str
    colours: Mapping[str, str]

    def __getitem__(self, role: str) -> str:
        return self.colours[role]


@dataclass(frozen=True, kw_only=True)
class ModeStyle:
    """Say how a mode is drawn in every chart: never by its colour alone.

    Attributes:
        role: of its colour.
        marker: of its points, as matplotlib calls it.
        glyph: the same marker as a character.
        dash: of its lines, as matplotlib calls it.
    """

    role: str
    marker: str
    glyph: str
    dash: str = "-"


def heat_step(ratio: float) -> int:
    """Return which of the heat map's colours a speed-up has, from 0."""
    return sum(ratio >= step for step in HEAT_STEPS)


def mode_styles(modes: Iterable[str]) -> dict[str, ModeStyle]:
    """Return the style of each mode: its own, or for an unknown one the next that is left."""
    spare = iter(_SPARE * 20)
    return {mode: _MODES.get(mode) or next(spare) for mode in dict.fromkeys(modes)}


_MODES: Mapping[str, ModeStyle] = MappingProxyType(
    {
        "eager": ModeStyle(role="mode-grey", marker="o", glyph="●"),
        "eager_fused": ModeStyle(role="mode-grey", marker="D", glyph="◆", dash=":"),
        "padded_eager": ModeStyle(role="mode-grey", marker="s", glyph="■", dash="--"),
        "breakable": ModeStyle(role="mode-blue", marker="o", glyph="●"),
        "breakable_unfused": ModeStyle(role="mode-blue", marker="s", glyph="■", dash="--"),
        "full": ModeStyle(role="mode-vermilion", marker="^", glyph="▲"),
        "compile_piecewise": ModeStyle(role="mode-green", marker="v", glyph="▼"),
        "transformers_eager": ModeStyle(role="mode-pink", marker="D", glyph="◆", dash="--"),
    }
)
_SPARE = (
    ModeStyle(role="mode-sky", marker="s", glyph="■"),
    ModeStyle(role="mode-olive", marker="^", glyph="▲"),
    ModeStyle(role="mode-violet", marker="v", glyph="▼"),
)

_BOTH: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # The page.
        "paper": ("#ffffff", "#14171c"),
        "panel": ("#f6f7f9", "#1b2027"),
        "text": ("#1b1f26", "#e4e7eb"),
        "muted": ("#5a6371", "#9ba5b3"),
        "line": ("#d9dde3", "#343b45"),
        "accent": ("#0066b3", "#6cb6f2"),
        "good": ("#0066b3", "#6cb6f2"),
        "bad": ("#b04a00", "#f3a563"),
        "alarm": ("#fff1dc", "#3b2a14"),
        # Modes.
        "mode-grey": ("#6b7280", "#98a2b1"),
        "mode-blue": ("#0072b2", "#56a8e8"),
        "mode-vermilion": ("#d55e00", "#f0814a"),
        "mode-green": ("#00865e", "#3dc19a"),
        "mode-pink": ("#b8568f", "#dd8fbc"),
        "mode-sky": ("#3aa3dc", "#8fd0f5"),
        "mode-olive": ("#8a7a00", "#c9b83a"),
        "mode-violet": ("#6d55b5", "#a893ea"),
        # The time line.
        "break": ("#e69f00", "#e8ae3c"),
        "phase": ("#b9c0ca", "#5c6673"),
        "kernel": ("#3d4552", "#c3cad4"),
        "gap": ("#f9d9cf", "#553127"),
        "on-bar": ("#ffffff", "#14171c"),
        "on-break": ("#1b1f26", "#14171c"),
        # The heat map, from slower to faster.
        "heat-0": ("#c05a0a", "#f0a35c"),
        "heat-1": ("#ec9346", "#b8651a"),
        "heat-2": ("#f9bf8c", "#7a4516"),
        "heat-3": ("#fde3cc", "#4a2f18"),
        "heat-4": ("#eceef1", "#262c35"),
        "heat-5": ("#d7e7f5", "#1a3650"),
        "heat-6": ("#aecfea", "#1d4d78"),
        "heat-7": ("#78aedb", "#276ba6"),
        "heat-8": ("#3781bd", "#4c9bd8"),
        "heat-9": ("#115a96", "#9bcdf5"),
        "on-heat-0": ("#ffffff", "#14171c"),
        "on-heat-1": ("#1b1f26", "#ffffff"),
        "on-heat-2": ("#1b1f26", "#e4e7eb"),
        "on-heat-3": ("#1b1f26", "#e4e7eb"),
        "on-heat-4": ("#4d5561", "#b4bdc9"),
        "on-heat-5": ("#1b1f26", "#e4e7eb"),
        "on-heat-6": ("#1b1f26", "#e4e7eb"),
        "on-heat-7": ("#1b1f26", "#ffffff"),
        "on-heat-8": ("#ffffff", "#14171c"),
        "on-heat-9": ("#ffffff", "#14171c"),
    }
)

LIGHT = Palette(name="light", colours={role: light for role, (light, _) in _BOTH.items()})
DARK = Palette(name="dark", colours={role: dark for role, (_, dark) in _BOTH.items()})
PAGE = Palette(
    name="page", colours={role: f"#01fe{number:02x}" for number, role in enumerate(_BOTH)}
)
"""Draws in colours that nothing else has, each of which ``use_variables`` replaces."""


def use_variables(svg: str) -> str:
    """Replace the colours of ``PAGE`` by variables of the style sheet, so that one drawing serves day and night."""
    for role, colour in PAGE.colours.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg
