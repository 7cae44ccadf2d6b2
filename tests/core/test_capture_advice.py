"""What is said about the errors that CUDA raises in a capture; the errors themselves are for a GPU."""

from typing import Any

import pytest
import torch

from bcg_core.capture_advice import advise

STREAM: Any = torch.cuda.Stream

SAID = {
    "a host read": (
        "CUDA error: operation not permitted when stream is capturing",
        "eager_on_graph",
    ),
    "an earlier error": (
        "CUDA error: operation failed due to a previous error during capture",
        "capture_error_mode='thread_local'",
    ),
    "a generator of one's own": (
        "Attempt to increase offset for a CUDA generator not in capture mode.",
        "CUDASegmentEngine(generators=[generator])",
    ),
    "a wait for another stream": (
        "CUDA error: dependency created on uncaptured work in another stream",
        "wait for it before the capture",
    ),
}


@pytest.mark.parametrize(("message", "advice"), SAID.values(), ids=SAID)
def test_an_error_of_a_capture_comes_with_a_way_out(message: str, advice: str) -> None:
    said = advise(RuntimeError(message), STREAM)
    assert said is not None
    assert advice in said


def test_other_errors_speak_for_themselves() -> None:
    assert advise(ValueError("a shape that does not fit"), STREAM) is None


def test_the_stream_that_was_waited_for_is_named() -> None:
    def wait_stream(stream: str) -> None:
        raise RuntimeError("dependency created on uncaptured work in another stream")

    with pytest.raises(RuntimeError) as caught:
        wait_stream("the stream of the tokeniser")
    assert "waits for 'the stream of the tokeniser'" in str(advise(caught.value, STREAM))
