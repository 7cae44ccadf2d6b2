"""How the command shows long work: one bar on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from bcg_harness.progress import Progress


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


@contextmanager
def progress_bar() -> Iterator[ProgressBar]:
    """Show a bar while the block runs, if stderr is a terminal."""
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield ProgressBar(bar)


def loading(progress: Progress) -> Callable[[int, int], None]:
    """Return what tells ``progress`` of tensors loaded, as (done, total)."""

    def report(done: int, total: int) -> None:
        if done == 1:
            progress.start("loading weights", total)
        progress.advance()

    return report
