"""Long work shows a bar on stderr, and only on a terminal."""

from io import StringIO

import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from bcg_core import TokenBuckets
from bcg_harness import Matrix, NoProgress, Progress, RandomTokens, builtin_cases
from bcg_harness.cli_progress import ProgressBar, progress_bar
from bcg_harness.testing import MaskBackend
from bcg_llama import LlamaModel


class Log(Progress):
    """Write down what is done."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.done: list[int] = []

    def start(self, what: str, total: int) -> None:
        self.phases.append((what, total))
        self.done.append(0)

    def advance(self, count: int = 1) -> None:
        self.done[-1] += count


def test_a_matrix_tells_of_references_capture_and_cases(small_model: LlamaModel) -> None:
    log, buckets = Log(), TokenBuckets([8, 16])
    cases = builtin_cases(buckets)[:2]
    source = RandomTokens(small_model.spec.vocab_size)
    Matrix(small_model, cases, buckets, source, progress=log).check("mask", MaskBackend)
    assert log.phases == [
        ("computing references", 2),
        ("capturing", 4),
        ("warming up mask", 1),
        ("mask", 2),
    ]
    assert log.done == [2, 4, 0, 2]


def test_the_bar_shows_the_phase_at_hand() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    bar = Bar(console=console)
    progress = ProgressBar(bar)
    progress.start("capturing", 4)
    progress.start("sdpa", 10)
    progress.advance(3)
    assert [(task.description, task.completed, task.total) for task in bar.tasks] == [
        ("sdpa", 3, 10)
    ]


def test_nothing_is_shown_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        progress.start("capturing", 4)
        progress.advance()
    assert capfd.readouterr() == ("", "")


def test_no_progress_takes_anything() -> None:
    progress = NoProgress()
    progress.start("capturing", 4)
    progress.advance(2)
