"""What to do about the errors that CUDA raises in a capture, which name neither stream nor way out."""

import gc
from types import TracebackType

import torch

_ADVICE = {
    "not permitted when stream is capturing": (
        "inside a segment the host cannot wait for the device, read its values (.item(), .cpu(), nonzero, print) or "
        "make what allocates outside of the pool: move it into a break (eager_on_graph)"
    ),
    "previous error during capture": (
        "something in this segment, or in another thread if capture_error_mode is 'global', did what a capture "
        "forbids: look for the first error, or capture with CUDASegmentEngine(capture_error_mode='thread_local')"
    ),
    "for a CUDA generator not in capture mode": (
        "a random generator of one's own must be known to the graphs: pass it as "
        "CUDASegmentEngine(generators=[generator])"
    ),
}


def advise(error: BaseException, capture: torch.cuda.Stream) -> str | None:
    """Return what to do about ``error``, raised while ``capture`` was capturing; None where there is nothing to add."""
    message = str(error)
    if "has unjoined work" in message:
        return (
            f"work of this segment went to another stream and was not waited for (streams alive: {_others(capture)}): "
            "end it with torch.cuda.current_stream().wait_stream(that stream), or move it into a break"
        )
    if "uncaptured work in another stream" in message:
        return (
            f"this segment waits for {_waited_for(error.__traceback__)}, whose work is not part of the capture: wait "
            "for it before the capture or in a break, or let that stream wait for the capturing one first"
        )
    return next((advice for part, advice in _ADVICE.items() if part in message), None)


def _others(capture: torch.cuda.Stream) -> str:
    """List the streams that Python code holds, one of which is meant: CUDA does not say which."""
    known = (capture, torch.cuda.default_stream(capture.device))
    found = {
        repr(stream)
        for stream in gc.get_objects()
        if issubclass(type(stream), torch.cuda.Stream) and stream not in known
    }
    return ", ".join(sorted(found)) or "none in Python"


def _waited_for(traceback: TracebackType | None) -> str:
    """Return the stream or event that was waited for, from the frames of torch's own functions."""
    found = "another stream"
    while traceback is not None:
        waiting = traceback.tb_frame.f_locals
        if traceback.tb_frame.f_code.co_name in ("wait_stream", "wait_event"):
            found = repr(waiting.get("stream", waiting.get("event", found)))
            if "stream" in waiting:
                return found
        traceback = traceback.tb_next
    return found
