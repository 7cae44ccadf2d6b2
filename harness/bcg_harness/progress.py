"""How long work tells of its progress."""

from typing import Protocol


class Progress(Protocol):
    """Be told of long work, phase by phase."""

    def start(self, what: str, total: int) -> None:
        """Begin ``what``, which has ``total`` steps; whatever was begun before is done."""

    def advance(self, count: int = 1) -> None:
        """Count ``count`` steps as done."""


class NoProgress(Progress):
    """Tell nobody."""

    def start(self, what: str, total: int) -> None:
        """Do nothing."""

    def advance(self, count: int = 1) -> None:
        """Do nothing."""
