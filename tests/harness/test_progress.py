"""Long work shows a bar on stderr if that is a terminal, and lines elsewhere."""

from io import StringIO

import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from bcg_core import TokenBuckets
from bcg_harness import Matrix, NoProgress, Progress, RandomTokens, builtin_cases
from bcg_harness.cli_progress import SECONDS_BETWEEN_LINES, ProgressBar, ProgressLines, progress_bar
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


def test_lines_are_shown_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        progress.start("capturing", 4)
        assert capfd.readouterr() == ("", "capturing ...\n")


@pytest.mark.parametrize(
    ("waits", "shown"),
    [
        pytest.param([0.0, 0.0], "sdpa ...\n", id="no_sooner_than_due"),
        pytest.param([SECONDS_BETWEEN_LINES, 0.0], "sdpa ...\nsdpa: 1 of 10\n", id="when_due"),
        pytest.param([0.0, SECONDS_BETWEEN_LINES], "sdpa ...\nsdpa: 2 of 10\n", id="with_all_done"),
    ],
)
def test_lines_say_how_far_it_is_every_few_seconds(waits: list[float], shown: str) -> None:
    log, now = StringIO(), [0.0]
    progress = ProgressLines(Console(file=log), lambda: now[0])
    progress.start("sdpa", 10)
    for wait in waits:
        now[0] += wait
        progress.advance()
    assert log.getvalue() == shown


def test_no_progress_takes_anything() -> None:
    progress = NoProgress()
    progress.start("capturing", 4)
    progress.advance(2)
