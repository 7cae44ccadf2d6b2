"""How much memory a capture is said to take, bucket by bucket, and how often the engine is asked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bcg_core import CaptureReport, CPUSegmentEngine

Make = Callable[..., Any]


class Metered(CPUSegmentEngine):
    """Answer from a list how much memory is held; run out of memory at the end of segment ``fails_at``, if given."""

    def __init__(self, *answers: int, fails_at: int | None = None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.fails_at = fails_at
        self.ended = 0

    def memory_bytes(self) -> int:
        return self.answers.pop(0)

    def end(self) -> Any:
        self.ended += 1
        if self.ended == self.fails_at:
            raise torch.OutOfMemoryError("no room")
        return super().end()


@pytest.fixture
def capture_with(make_runner: Make) -> Callable[[Metered], CaptureReport]:
    """Return a function that captures buckets of 16 and 8 tokens with an engine."""

    def capture(engine: Metered) -> CaptureReport:
        report: CaptureReport = make_runner(engine=engine, captured=False).capture()
        return report

    return capture


def growth(report: CaptureReport) -> dict[int, int]:
    return {bucket.bucket: bucket.memory_bytes for bucket in report.buckets}


def test_an_engine_is_asked_for_its_memory_once_a_bucket(
    capture_with: Callable[[Metered], CaptureReport],
) -> None:
    engine = Metered(100, 160, 190)
    report = capture_with(engine)
    assert engine.answers == []
    assert growth(report) == {16: 60, 8: 30}
    assert report.memory_bytes == 190


def test_what_a_failed_bucket_left_is_not_counted_for_the_next_one(
    capture_with: Callable[[Metered], CaptureReport],
) -> None:
    report = capture_with(Metered(100, 140, 170, fails_at=2))
    assert list(report.failed) == [16]
    assert growth(report) == {8: 30}
