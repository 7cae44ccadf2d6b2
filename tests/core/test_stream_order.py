"""Calls on different streams: later work waits for earlier work, and nothing happens where the stream is the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bcg_core.stream_order import StreamOrder, stream_order


class Streams:
    """Stand for the streams of GPU 1; ``now`` is the current one, ``waits`` who waited for whom."""

    def __init__(self) -> None:
        self.now = 0
        self.waits: list[tuple[int, int]] = []
        self.asked = 0

    def number(self, index: int) -> int:
        assert index == 1
        return self.now

    def current(self, index: int) -> Any:
        assert index == 1
        self.asked += 1
        return Stream(self, self.now)


class Stream:
    def __init__(self, streams: Streams, number: int) -> None:
        self._streams, self.number = streams, number

    def wait_stream(self, other: "Stream") -> None:
        self._streams.waits.append((self.number, other.number))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.number, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current)
    return streams


@pytest.fixture
def call_on(streams: Streams) -> Callable[[int], None]:
    """Return a function that makes a call on a stream."""
    order = StreamOrder(torch.device("cuda", 1))

    def call(number: int) -> None:
        streams.now = number
        order.follow()

    return call


@pytest.mark.parametrize(
    ("calls", "waits"),
    [
        ([7], []),
        ([7, 7, 7], []),
        ([7, 8], [(8, 7)]),
        ([7, 8, 8, 7], [(8, 7), (7, 8)]),
        ([0, 8, 0], [(8, 0), (0, 8)]),
    ],
    ids=str,
)
def test_a_call_waits_for_the_last_one_where_the_stream_is_another(
    streams: Streams, call_on: Callable[[int], None], calls: list[int], waits: list[Any]
) -> None:
    for number in calls:
        call_on(number)
    assert streams.waits == waits


def test_calls_on_one_stream_make_no_stream_objects(
    streams: Streams, call_on: Callable[[int], None]
) -> None:
    for _ in range(5):
        call_on(7)
    assert streams.asked == 1


def test_calls_on_a_gpu_are_ordered(streams: Streams) -> None:
    follow = stream_order(torch.device("cuda", 1))
    follow()
    streams.now = 3
    follow()
    assert streams.waits == [(3, 0)]


def test_calls_on_a_cpu_ask_for_no_stream(streams: Streams) -> None:
    stream_order(torch.device("cpu"))()
    assert streams.asked == 0
