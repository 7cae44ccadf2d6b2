"""Numbers as people read them."""

from collections.abc import Sequence

NOTHING = "–"
"""Stands where there is no number."""


def duration(seconds: float) -> str:
    """Return a time with three digits and the unit that suits it."""
    if seconds == 0:
        return "0 s"
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if abs(seconds) * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def milliseconds(seconds: float | None) -> str:
    """Return a time for a column of milliseconds."""
    return NOTHING if seconds is None else f"{seconds * 1e3:,.3f}"


def size(count: float | None) -> str:
    """Return bytes in MiB, or in GiB from one on."""
    if count is None:
        return NOTHING
    mib = count / 2**20
    return f"{_three_digits(mib)} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"


def ratio(value: float) -> str:
    """Return a factor, such as 2.31×."""
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def percent(fraction: float) -> str:
    """Return a fraction as a percentage."""
    return f"{fraction * 100:.1f} %"


def whole(number: float | None) -> str:
    """Return a number without digits behind the point, thousands set apart."""
    return NOTHING if number is None else f"{number:,.0f}"


def short_tokens(count: int) -> str:
    """Return a token count for an axis: 2048 is 2k."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, plural where that is right."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """Return words as a phrase: a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if magnitude < 99.95 else f"{value:,.0f}"
