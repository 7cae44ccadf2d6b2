"""Runs that look like real ones. All numbers are made up, to have something to draw."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log2
from pathlib import Path
from random import Random

import pytest

from bcg_harness.bench.cell import NO_BACKEND, Cell, CheckSummary, DeviceTime, Status
from bcg_harness.bench.costs import BreakOverhead, BucketCost
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.setup import BucketRecord, ModeSetup
from bcg_harness.bench.spread import Speedup, Spread
from bcg_harness.bench.timeline import Span, Timeline
from bcg_harness.bench.workload_record import WorkloadRecord
from bcg_harness.html.page import Source, compare_sources, render_page, view_runs

BACKENDS = {
    "sdpa": 1.5,
    "flashinfer[kernel=fa2]": 1.0,
    "flashinfer[kernel=fa3]": 0.95,
    "flash_attn[version=3]": 0.9,
    "xformers": 1.2,
}
MODES = {
    "eager": 1.0,
    "padded_eager": 1.05,
    "breakable": 0.42,
    "full": 0.3,
    "compile_piecewise": 0.6,
}
FULL_GRAPH = "flashinfer[kernel=fa2]"
OWN_ATTENTION = "transformers_eager"
LADDER = (16, 32, 64, 128, 256, 512, 1024, 2048)
LAYERS = 16
TOO_LONG = "more tokens than the largest bucket (2048)"
NOT_DECLARED = "supports_full_graph: the backend does not declare it"
WRONG = "attention differs from its reference: error 3.1e-01, budget 8.0e-03"


def workloads() -> tuple[WorkloadRecord, ...]:
    singles = [
        WorkloadRecord(name=f"single-{n}", description=f"one prompt of {n} tokens", steps=(((0, n),),))
        for n in (16, 64, 256, 512, 1024, 2048, 8192)
    ]  # fmt: skip
    chat = tuple((0, n) for n in (33, 180, 240, 75, 410, 120))
    turns = tuple((900 + n, n) for n in (60, 25, 110, 40))
    return (
        *singles,
        WorkloadRecord(
            name="concurrent-16x64", description="16 prompts of 64", steps=(((0, 64),) * 16,)
        ),
        WorkloadRecord(name="chat-12", description="12 chat prompts at once", steps=(chat, chat)),
        WorkloadRecord(name="turns-4", description="4 next turns of a chat", steps=(turns,)),
    )


def spread(seconds: float, noise: float = 0.01) -> Spread:
    return Spread(
        samples=50,
        median=seconds,
        p90=seconds * (1 + 3 * noise),
        q1=seconds * (1 - noise),
        q3=seconds * (1 + noise),
    )


def latency(workload: WorkloadRecord, host: float, attention: float, random: Random) -> float:
    """Return the longer of what the host launches and what the device computes."""
    return sum(
        max(5e-3 * host, 2e-6 * tokens + 3e-10 * tokens**2 * attention) + 2e-4 + 1e-6 * tokens
        for step in workload.steps
        if (tokens := sum(new for _, new in step))
    ) * random.uniform(0.97, 1.03)


def measured(backend: str, mode: str, workload: WorkloadRecord, random: Random) -> Cell:
    median = latency(workload, MODES.get(mode, 1.6), BACKENDS.get(backend, 1.3), random)
    total = workload.real_tokens
    padded = sum(
        next((b for b in LADDER if b >= sum(n for _, n in step)), sum(n for _, n in step))
        for step in workload.steps
    )
    graph = mode in ("breakable", "full")
    replays = graph or mode == "compile_piecewise"
    held = all(sum(new for _, new in step) <= LADDER[-1] for step in workload.steps)
    return Cell(
        backend=backend,
        mode=mode,
        workload=workload.name,
        status=Status.MEASURED,
        check=CheckSummary(error=3.2e-3, budget=8.1e-3, what="raw_shape"),
        latency=spread(median),
        ttft=spread(median * 1.04),
        enqueue=spread(median * 0.8),
        step_latency=tuple(median / len(workload.steps) for _ in workload.steps),
        device=DeviceTime(busy=median * 0.7, gap=median * 0.3, launches=33 if graph else 290, kernels=290),
        real_tokens=total,
        padded_tokens=padded if graph or mode == "padded_eager" else total,
        served={(f"bucket {padded}" if held else TOO_LONG) if replays else mode: 50},
        peak_memory=int(4.2 * 2**30) + padded * 200_000,
    )  # fmt: skip


def all_cells(random: Random) -> Iterator[Cell]:
    for workload in workloads():
        for backend in BACKENDS:
            baseline = measured(backend, "eager", workload, random)
            assert baseline.latency is not None
            for mode in MODES:
                cell = measured(backend, mode, workload, random)
                lost = {
                    "latency": None,
                    "ttft": None,
                    "enqueue": None,
                    "device": None,
                    "check": None,
                }
                if mode == "eager":
                    yield baseline
                elif mode == "full" and backend != FULL_GRAPH:
                    yield replace(cell, status=Status.UNAVAILABLE, reason=NOT_DECLARED, **lost)
                elif (mode, backend, workload.name) == ("breakable", "xformers", "turns-4"):
                    yield replace(cell, status=Status.FAILED, reason=WRONG, **lost)
                else:
                    assert cell.latency is not None
                    speedup = Speedup.over(baseline.latency, cell.latency)
                    yield replace(cell, speedup=speedup)
        yield measured(NO_BACKEND, OWN_ATTENTION, workload, random)  # fmt: skip


def all_setups() -> Iterator[ModeSetup]:
    buckets = tuple(
        BucketRecord(
            bucket=bucket,
            segments=LAYERS + 1,
            breaks=LAYERS,
            seconds=0.02 + bucket * 1e-5,
            memory_bytes=180 * 2**20 if bucket == LADDER[-1] else 2**19,
        )
        for bucket in reversed(LADDER)
    )
    yield ModeSetup(
        backend=NO_BACKEND,
        mode="breakable",
        warm_up_seconds=6.2,
        capture_seconds=sum(b.seconds for b in buckets),
        graph_memory=200 * 2**20,
        buckets=buckets,
    )
    full = tuple(replace(b, segments=1, breaks=0, seconds=b.seconds * 1.7) for b in buckets[1:])
    yield ModeSetup(
        backend=FULL_GRAPH,
        mode="full",
        warm_up_seconds=0.4,
        capture_seconds=sum(b.seconds for b in full),
        graph_memory=90 * 2**20,
        buckets=full,
        failed={2048: "out of memory"},
    )
    for number, backend in enumerate(BACKENDS):
        yield ModeSetup(
            backend=backend, mode="compile_piecewise", warm_up_seconds=31.0 + 4 * number
        )
        yield ModeSetup(backend=backend, mode="eager", warm_up_seconds=0.08 + 0.02 * number)  # fmt: skip


def timeline(backend: str, random: Random) -> Timeline:
    spans = [Span(lane="host", name="load", start=0.0, seconds=60e-6)]
    host, device = 60e-6, 75e-6
    for layer in range(LAYERS + 1):
        spans.append(Span(lane="host", name=f"segment {layer}", start=host, seconds=9e-6))
        device = max(device, host + 8e-6)
        for _ in range(9):
            seconds = random.uniform(1.5e-6, 5e-6)
            spans.append(Span(lane="device", name="gemm", start=device, seconds=seconds))
            device += seconds + 0.6e-6
        host += 9e-6
        if layer < LAYERS:
            wait = random.uniform(38e-6, 52e-6)
            spans.append(Span(lane="host", name=f"break {layer}", start=host, seconds=wait))
            device = max(device, host + wait * 0.7)
            spans.append(Span(lane="device", name="attention", start=device, seconds=7e-6))
            device, host = device + 7e-6, host + wait
    spans.append(Span(lane="host", name="head", start=host, seconds=120e-6))
    spans.append(Span(lane="device", name="lm_head", start=host + 50e-6, seconds=80e-6))
    return Timeline(backend=backend, mode="breakable", workload="single-256", spans=tuple(spans))


def make_report(seed: int = 0) -> BenchReport:
    """Return a run on a GPU; another seed is another run of the same."""
    random = Random(seed)
    return BenchReport(
        started="2026-01-02T03:04:05",
        seconds=412.0,
        environment={
            "device": "cuda",
            "hardware": "Example GPU 80GB",
            "compute_capability": [9, 0],
            "gpu_memory_bytes": 80 * 2**30,
            "driver": "1.2.3",
            "cuda": "13.0",
            "engine": "CUDA graphs",
            "threads": 8,
            "python": "3.12.1",
            "platform": "Linux x86_64",
            "libraries": {"breakable-cuda-graph": "0.1.0", "torch": "2.13.0+cu130", "triton": "3.5"},
        },
        model={
            "name": "llama-1b",
            "num_layers": LAYERS,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 64,
            "hidden_size": 2048,
            "vocab_size": 128256,
            "max_positions": 8192,
            "dtype": "bfloat16",
            "device": "cuda",
        },
        settings={"buckets": list(LADDER), "page_size": 16, "rounds": 50, "seed": 0},
        workloads=workloads(),
        skipped={"torch_varlen": "needs torch 2.11 or newer"},
        notes={"sdpa": ["gathers keys request by request"], "xformers": []},
        setups=tuple(all_setups()),
        cells=tuple(all_cells(random)),
        break_overhead=BreakOverhead(
            bucket=256, breaks=LAYERS, host_per_break=5.7e-6, wall_per_break=3.1e-6
        ),
        bucket_costs=tuple(
            BucketCost(
                bucket=bucket,
                backend=FULL_GRAPH,
                replay=spread(2e-3 + 1e-6 * bucket),
                eager=spread(5e-3 + 1e-6 * bucket),
                capture_seconds=0.02 * log2(bucket),
                memory_bytes=2**20,
            )
            for bucket in LADDER
        ),
        timelines=tuple(timeline(backend, random) for backend in BACKENDS),
    )  # fmt: skip


@pytest.fixture(scope="package", autouse=True)
def drawing_libraries() -> None:
    """Skip where the extra is not installed."""
    pytest.importorskip(
        "jinja2", reason="needs the extra: pip install 'breakable-cuda-graph[report]'"
    )
    pytest.importorskip(
        "matplotlib", reason="needs the extra: pip install 'breakable-cuda-graph[report]'"
    )


@pytest.fixture(scope="package")
def recorded() -> BenchReport:
    """Return a run on a GPU."""
    return make_report(0)


@pytest.fixture(scope="package")
def repeated() -> BenchReport:
    """Return the same again, with other noise."""
    return make_report(1)


@pytest.fixture(scope="package")
def brief(recorded: BenchReport) -> BenchReport:
    """Return a run of one backend, which is drawn quickly."""
    cells = tuple(cell for cell in recorded.cells if cell.backend == "sdpa")
    return replace(recorded, cells=cells, timelines=recorded.timelines[:1])


@pytest.fixture(scope="package")
def render() -> Callable[..., str]:
    """Return a function that makes a page of runs, whose files are run0.json, run1.json, ..."""

    def render_all(*reports: BenchReport) -> str:
        sources = [
            Source(name=f"run{number}.json", report=report) for number, report in enumerate(reports)
        ]
        return render_page(*view_runs(sources), compare_sources(sources))

    return render_all


@pytest.fixture(scope="package")
def page(render: Callable[..., str], recorded: BenchReport) -> str:
    """Return the page of a run on a GPU."""
    return render(recorded)


@pytest.fixture(scope="package")
def read() -> Callable[[str], str]:
    """Return a function that returns what a reader sees of a page."""

    def text_of(page: str) -> str:
        body = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.DOTALL)
        return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))

    return text_of


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a run to a file as ``bcg bench --json`` does."""

    def write(run: BenchReport, name: str = "out.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(run.to_json()), encoding="utf-8")
        return path

    return write
