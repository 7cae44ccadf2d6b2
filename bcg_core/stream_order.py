"""The order of calls that share memory, and come from different streams of one GPU."""

from collections.abc import Callable

import torch


class StreamOrder:
    """Order the work of each call behind that of the last, where their current streams differ.

    Costs a call on the stream of the last a tenth of a microsecond of host time.

    Args:
        device: a CUDA device, with its index; streams are its.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._number: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Make what is queued on the current stream from now on wait for what was queued on the last call's."""
        number = torch._C._cuda_getCurrentRawStream(self._index)
        if number == self._number:
            return
        stream = torch.cuda.current_stream(self._index)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._number, self._stream = number, stream


def stream_order(device: torch.device) -> Callable[[], None]:
    """Return what a call on ``device`` does first; nothing on a CPU, where work is done when it is asked for."""
    return StreamOrder(device).follow if device.type == "cuda" else _nothing


def _nothing() -> None:
    """Do nothing."""
