"""Run a workload once in one mode, and write down when what happened."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from bcg_core import PrefillBatch
from bcg_core.errors import PASSED_ON
from bcg_core.garbage import no_garbage_collection
from bcg_harness.bench.arena import Scene
from bcg_harness.bench.mode import ExecutionMode, Prefilled
from bcg_harness.errors import DeviceLostError


def synchronise(device: torch.device) -> None:
    """Wait on the host until ``device`` has done all work; a CPU has by then."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def require_device(device: torch.device, last: str) -> None:
    """Raise DeviceLostError where ``device`` can no longer be used, naming what ran ``last``."""
    try:
        synchronise(device)
    except torch.AcceleratorError as error:
        raise DeviceLostError(
            f"the GPU is lost to this process after {last}: {str(error).splitlines()[0]}. Leave it out, or set "
            "CUDA_LAUNCH_BLOCKING=1 to see where it happens"
        ) from error


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Hold the times of one batch, in seconds.

    Attributes:
        build: making the batch from token ids in host memory.
        enqueue: until the host had queued all of the prefill.
        latency: until the device had finished it.
        fetch: bringing the sampled tokens to the host after that.
    """

    build: float
    enqueue: float
    latency: float
    fetch: float

    @property
    def to_first_token(self) -> float:
        """Return the time from token ids in host memory to sampled tokens there."""
        return self.build + self.latency + self.fetch


Observer = Callable[[int, PrefillBatch, Prefilled], None]
"""Called after each timed step with its position, batch and result; not timed."""


def run_once(
    mode: ExecutionMode, scenes: Sequence[Scene], observe: Observer | None = None
) -> list[StepTimes]:
    """Run the timed steps of a workload in order, and time each; the device is idle before each of them."""
    device = mode.ground.device
    timed = [scene for scene in scenes if scene.timed]
    times = []
    for position, scene in enumerate(timed):
        synchronise(device)
        begun = perf_counter()
        batch = scene.batch()
        built = perf_counter()
        mode.stage(batch)
        synchronise(device)
        started = perf_counter()
        result = mode.prefill(batch)
        queued = perf_counter()
        synchronise(device)
        finished = perf_counter()
        result.next_tokens_B.tolist()
        fetched = perf_counter()
        if observe is not None:
            observe(position, batch, result)
        times.append(
            StepTimes(
                build=built - begun,
                enqueue=queued - started,
                latency=finished - started,
                fetch=fetched - finished,
            )
        )
    return times


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Say how often to repeat.

    Attributes:
        seconds: to spend on each mode of each workload, about.
        least: rounds at least.
        most: rounds at most.
    """

    seconds: float = 0.4
    least: int = 7
    most: int = 40

    def rounds(self, pass_seconds: float) -> int:
        """Return how many passes of ``pass_seconds`` to make."""
        return min(self.most, max(self.least, int(self.seconds / max(pass_seconds, 1e-9))))


def interleave(
    modes: Sequence[ExecutionMode], scenes: Sequence[Scene], rounds: int
) -> tuple[dict[ExecutionMode, list[list[StepTimes]]], dict[ExecutionMode, BaseException]]:
    """Run all ``modes`` in turn, ``rounds`` times, each round beginning with another.

    Taking turns lets whatever drifts (clocks, other load) hit all modes alike. Garbage collection is held off.

    Returns times by mode and round, and what was raised, by mode; a mode that raises takes no further turn and has no
    times.
    """
    times: dict[ExecutionMode, list[list[StepTimes]]] = {mode: [] for mode in modes}
    raised: dict[ExecutionMode, BaseException] = {}
    with no_garbage_collection():
        for number in range(rounds):
            first = number % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                if mode not in raised:
                    try:
                        times[mode].append(run_once(mode, scenes))
                    except PASSED_ON:
                        raise
                    except BaseException as error:  # noqa: BLE001  # a mode's or a backend's
                        raised[mode] = error
    return {mode: of_mode for mode, of_mode in times.items() if mode not in raised}, raised
