"""How the command shows long work on stderr: one bar on a terminal, lines in a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from bcg_harness.progress import Progress

SECONDS_BETWEEN_LINES = 5.0
"""How often a log is told how far long work is."""


class ProgressBar(Progress):
    """Show progress as one bar on stderr, replaced phase by phase."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def start(self, what: str, total: int) -> None:
        """Show a new bar in place of the last."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total)

    def advance(self, count: int = 1) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._bar.advance(self._task, count)


class ProgressLines(Progress):
    """Show progress as lines: what is begun, and how far it is every few seconds.

    Args:
        console: where they go, each at once.
        clock: tells seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = perf_counter) -> None:
        self._console = console
        self._clock = clock
        self._what, self._total, self._done = "", 0, 0
        self._shown = clock()

    def start(self, what: str, total: int) -> None:
        """Say what begins, and count from 0."""
        self._what, self._total, self._done = what, total, 0
        self._show(f"{what} ...")

    def advance(self, count: int = 1) -> None:
        """Say how far it is, if nothing was said for a while."""
        self._done += count
        if self._clock() - self._shown >= SECONDS_BETWEEN_LINES:
            self._show(f"{self._what}: {self._done} of {self._total}")

    def _show(self, line: str) -> None:
        self._shown = self._clock()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show progress while the block runs: a bar if stderr is a terminal, else lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(console)
        return
    with Bar(console=console, transient=True) as bar:
        yield ProgressBar(bar)


def loading(progress: Progress) -> Callable[[int, int], None]:
    """Return what tells ``progress`` of tensors loaded, as (done, total)."""

    def report(done: int, total: int) -> None:
        if done == 1:
            progress.start("loading weights", total)
        progress.advance()

    return report
