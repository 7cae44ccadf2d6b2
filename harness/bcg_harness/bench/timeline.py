"""Where the time of one replay goes, in seconds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Span:
    """Hold one bar of a time line.

    Attributes:
        lane: "host" for segments and breaks as the host launches them, "device" for what the device runs.
        name: of a segment ("segment 3"), a break ("break 3"), a phase of the host ("load", "head") or a kernel.
        start: since the beginning of the prefill.
        seconds: how long.
    """

    lane: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Hold where the time of one replay went.

    Attributes:
        backend: label.
        mode: name.
        workload: name.
        spans: bars of all lanes, by start.
    """

    backend: str
    mode: str
    workload: str
    spans: tuple[Span, ...]
