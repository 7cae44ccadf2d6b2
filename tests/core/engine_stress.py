"""Make, use, break and drop engines at random in one process; exit with 1 if memory grows or a replay is wrong.

Usage: python engine_stress.py STEPS [SEED]; prints a JSON record.
"""

import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CUDASegmentEngine,
    break_graph,
    eager_on_graph,
)
from bcg_core.cuda_process import broken_captures

ALLOWED_GROWTH = 8 << 20
"""Of reserved device memory between the readings after a tenth of the steps and at the end."""


class Stress:
    """Hold a few engines with graphs and do random things to them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.x = torch.randn(256, 512, device="cuda").bfloat16()
        self.w = torch.randn(512, 512, device="cuda").bfloat16() / 512**0.5
        self.side, self.outside = torch.cuda.Stream(), torch.cuda.Stream()
        self.engines: list[CUDASegmentEngine] = []
        self.graphs: list[tuple[BreakableCUDAGraph, Tensor, int, int]] = []
        self.done: Counter[str] = Counter()
        self.wrong = 0

    def step(self) -> None:
        actions: list[Callable[[], None]] = [
            self.make,
            self.capture,
            self.capture,
            self.replay,
            self.replay,
            self.abort,
            self.drop_graph,
            self.drop_engine,
            self.pin,
        ]
        action = self.random.choice(actions)
        action()
        self.done[action.__name__] += 1

    def engine(self) -> CUDASegmentEngine:
        if not self.engines:
            self.make()
        return self.random.choice(self.engines)

    def make(self) -> None:
        if len(self.engines) >= 6:
            self.drop_engine()
        self.engines.append(CUDASegmentEngine())

    def work(self, rows: int, breaks: int) -> Tensor:
        y = self.x[:rows] @ self.w
        for _ in range(breaks):
            break_graph()
            y = torch.nn.functional.silu(y @ self.w)
        return y

    def capture(self) -> None:
        rows, breaks = self.random.randint(1, 256), self.random.randint(0, 6)
        graph = BreakableCUDAGraph(self.engine())
        with torch.inference_mode(), BreakableCUDAGraphCapture(graph):
            y = self.work(rows, breaks)
        self.graphs.append((graph, y, rows, breaks))
        if len(self.graphs) > 12:
            self.drop_graph()

    def replay(self) -> None:
        if not self.graphs:
            return
        graph, y, rows, breaks = self.random.choice(self.graphs)
        with torch.inference_mode():
            self.x.normal_()
            graph.replay()
            if not torch.equal(y, self.work(rows, breaks)):
                self.wrong += 1

    def abort(self) -> None:
        """Fail a capture in one of the ways there are; the error must arrive, and nothing else happen."""
        fail = self.random.choice([self.read, self.fork, self.wait, self.err, self.err_in_break])
        graph = BreakableCUDAGraph(self.engine())
        try:
            with torch.inference_mode(), BreakableCUDAGraphCapture(graph):
                self.work(64, self.random.randint(0, 3))
                fail()
        except RuntimeError:
            self.done[f"abort by {fail.__name__}"] += 1
        else:
            self.wrong += 1

    def read(self) -> None:
        self.x.sum().item()

    def fork(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.x.mul(2)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self.outside)

    def err(self) -> None:
        raise RuntimeError("a mistake in a segment")

    def err_in_break(self) -> None:
        eager_on_graph(self.err)()

    def drop_graph(self) -> None:
        if self.graphs:
            self.graphs.pop(self.random.randrange(len(self.graphs)))

    def drop_engine(self) -> None:
        if self.engines:
            gone = self.engines.pop(self.random.randrange(len(self.engines)))
            self.graphs = [entry for entry in self.graphs if entry[0].engine is not gone]

    def pin(self) -> None:
        torch.empty(self.random.randint(1, 1 << 20), pin_memory=True).fill_(1)

    def held(self) -> dict[str, int]:
        """Drop everything, and read what the process still holds."""
        self.graphs, self.engines = [], []
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        status = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return {
            "reserved_bytes": torch.cuda.memory_reserved(),
            "resident_bytes": int(status[1]) * 4096,
            "broken_captures": broken_captures(),
        }


def main() -> int:
    """Run, print what happened, and judge."""
    steps, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    stress = Stress(seed)
    readings = []
    for number in range(1, steps + 1):
        stress.step()
        if number % max(steps // 10, 1) == 0:
            readings.append({"step": number, **stress.held()})
    growth = readings[-1]["reserved_bytes"] - readings[0]["reserved_bytes"]
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": steps,
        "seed": seed,
        "done": dict(sorted(stress.done.items())),
        "wrong_replays": stress.wrong,
        "reserved_growth_bytes": growth,
        "readings": readings,
    }
    print(json.dumps(record))
    return int(stress.wrong > 0 or growth > ALLOWED_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
