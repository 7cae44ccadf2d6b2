"""What becomes of requests of a trace that are longer than the model's context."""

from enum import StrEnum


class Longer(StrEnum):
    """Name the ways, as ``--longer`` takes them."""

    SKIP = "skip"
    """Leave them out, as a server does: it answers them with an error, and serves the others."""
    CUT = "cut"
    """Keep as many of their first tokens as the context holds, cached ones included."""
    REFUSE = "refuse"
    """Refuse the whole trace."""
