"""On a GPU: what a caller has switched on in torch leaks nowhere, with real kernels and real streams.

Shape letters: R real tokens, B requests.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bcg_core import (
    AmbientStateError,
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Chunk,
    CUDASegmentEngine,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    eager_on_graph,
)
from bcg_harness.testing.ambient_states import (
    MODES,
    State,
    default_device,
    default_dtype,
    deterministic,
    fingerprint,
    within,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
]


@contextmanager
def other_stream() -> Iterator[None]:
    """Run on a stream of its own, ordered after and before the caller's."""
    caller, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(caller)
    with torch.cuda.stream(side):
        yield
    caller.wait_stream(side)


STATES: dict[str, State] = {
    "autocast_bfloat16": within(lambda: torch.autocast("cuda", dtype=torch.bfloat16)),
    "autocast_float16": within(lambda: torch.autocast("cuda", dtype=torch.float16)),
    "set_default_device": within(lambda: default_device("cuda")),
    "with_device": within(lambda: torch.device("cuda")),
    "default_float64": within(lambda: default_dtype(torch.float64)),
    "default_bfloat16": within(lambda: default_dtype(torch.bfloat16)),
    "anomaly_mode": within(lambda: torch.autograd.set_detect_anomaly(True)),
    "inference_mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "other_stream": within(other_stream),
    "all_at_once": within(
        other_stream,
        lambda: torch.autocast("cuda", dtype=torch.bfloat16),
        lambda: default_device("cuda"),
        lambda: default_dtype(torch.float64),
    ),
}


def clean(call: Callable[[], Any]) -> Any:
    return call()


@pytest.fixture
def make_runner(toy_model: type[Any]) -> Callable[[], PrefillRunner]:
    """Return a function that makes cache and runner for a model that was made before."""
    models = [toy_model(device="cuda"), toy_model(device="cuda")]

    def make() -> PrefillRunner:
        model = models.pop()
        cache = PagedKVCache(model.spec, num_pages=32, page_size=4)
        return PrefillRunner(model, cache, "sdpa", buckets=(8, 16), max_requests=8)

    return make


def batches(runner: PrefillRunner) -> tuple[PrefillBatch, Callable[[], PrefillBatch]]:
    """Return a batch without a prefix, and a way to make the next one, which has one."""
    first, second = KVSequence(), KVSequence()

    def behind() -> PrefillBatch:
        chunks = [
            Chunk(token_ids=[6, 5, 3], sequence=first),
            Chunk(token_ids=[9, 2], sequence=second),
        ]
        return PrefillBatch.from_chunks(chunks, runner.kv_cache)

    chunk = Chunk(token_ids=[3, 1, 4, 1, 5], sequence=first)
    return PrefillBatch.from_chunks([chunk], runner.kv_cache), behind


def serve(runner: PrefillRunner, mode: Mode, state: State = clean) -> list[Tensor]:
    """Serve two batches in ``state``, the second behind a prefix, and return all results but page 0."""
    before, behind = batches(runner)

    def prefill() -> list[Tensor]:
        results = []
        for batch in (before, behind()):
            result = runner.prefill(batch, mode=mode)
            results += [result.hidden_RD.clone(), result.logits_BV, result.next_tokens_B]
        return results

    results: list[Tensor] = [*state(prefill), runner.kv_cache.storage_L2PSKH[:, :, 1:]]
    torch.cuda.synchronize()
    return results


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [(t.dtype, t.device) for t in found] == [(t.dtype, t.device) for t in expected]
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(found)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_prefill_has_the_bits_of_one_in_a_clean_state(
    make_runner: Callable[[], PrefillRunner], state: State, mode: Mode
) -> None:
    runner, other = make_runner(), make_runner()
    for each in (runner, other):
        each.capture()
    assert_equal(serve(runner, mode, state), serve(other, mode))


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_capture_records_what_one_in_a_clean_state_does(
    make_runner: Callable[[], PrefillRunner], state: State
) -> None:
    runner, other = state(make_runner), make_runner()
    state(runner.capture)
    other.capture()
    assert_equal(serve(runner, Mode.BREAKABLE), serve(other, Mode.BREAKABLE))


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_capture_and_prefill_leave_the_state_of_the_caller(
    make_runner: Callable[[], PrefillRunner], state: State
) -> None:
    def compare() -> tuple[Any, Any]:
        stream, before = torch.cuda.current_stream(), fingerprint()
        runner = make_runner()
        runner.capture()
        runner.prefill(batches(runner)[0])
        assert torch.cuda.current_stream() == stream
        return before, fingerprint()

    before, after = state(compare)
    assert before == after


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_the_caller_is_refused_by_name(
    make_runner: Callable[[], PrefillRunner], mode: str
) -> None:
    runner = make_runner()
    with pytest.raises(AmbientStateError, match=f"^capture under {mode}, a torch"):
        MODES[mode](runner.capture)
    runner.capture()
    batch, _ = batches(runner)
    with pytest.raises(AmbientStateError, match=f"^prefill under {mode}, a torch"):
        MODES[mode](lambda: runner.prefill(batch))


# Deterministic algorithms: of the process, and left to it


@pytest.mark.filterwarnings("ignore:Deterministic behavior was enabled")
@pytest.mark.parametrize("when", ["capture", "serve", "both"])
def test_deterministic_algorithms_change_no_bits(
    make_runner: Callable[[], PrefillRunner], when: str
) -> None:
    demanded = within(lambda: deterministic(warn_only=True))
    runner, other = make_runner(), make_runner()
    (clean if when == "serve" else demanded)(runner.capture)
    other.capture()
    found = serve(runner, Mode.BREAKABLE, clean if when == "capture" else demanded)
    assert_equal(found, serve(other, Mode.BREAKABLE))


def test_a_process_that_demands_deterministic_algorithms_is_served() -> None:
    script = """
import torch
from bcg_core import *
from bcg_llama import PRESETS, random_llama
torch.use_deterministic_algorithms(True)
model = random_llama(PRESETS["tiny"], device="cuda", fuse=False)
cache = PagedKVCache(model.spec, num_pages=16)
runner = PrefillRunner(model, cache, "sdpa", buckets=(16, 32), max_requests=4)
runner.capture()
sequence = KVSequence()
for _ in range(2):
    batch = PrefillBatch.from_chunks([Chunk(token_ids=[1] * 11, sequence=sequence)], cache)
    first = runner.prefill(batch).hidden_RD.clone()
    assert torch.equal(first, runner.prefill(batch, mode="padded_eager").hidden_RD)
    assert first.isfinite().all()
"""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


# Precision of products


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision")
def test_a_replay_under_another_precision_than_at_capture_is_refused(
    make_runner: Callable[[], PrefillRunner],
) -> None:
    runner = make_runner()
    runner.capture()
    batch, _ = batches(runner)
    torch.set_float32_matmul_precision("high")
    words = r"torch\.backends\.cuda\.matmul\.fp32_precision was ieee and is tf32"
    with pytest.raises(AmbientStateError, match=words):
        runner.prefill(batch)
    torch.set_float32_matmul_precision("highest")
    assert runner.prefill(batch).admission.bucket == 8


@pytest.mark.parametrize(
    "flag",
    [
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ],
)
def test_another_way_to_add_up_than_at_capture_is_refused(
    make_runner: Callable[[], PrefillRunner], flag: str
) -> None:
    runner = make_runner()
    runner.capture()
    batch, _ = batches(runner)
    matmul = torch.backends.cuda.matmul
    before = getattr(matmul, flag)
    setattr(matmul, flag, not before)
    try:
        with pytest.raises(AmbientStateError, match=flag):
            runner.prefill(batch)
    finally:
        setattr(matmul, flag, before)


# Bare graphs


def test_a_bare_graph_replays_outside_of_autocast_as_it_was_captured_inside() -> None:
    x, w = torch.randn(4, 16, device="cuda"), torch.randn(16, 16, device="cuda")

    @eager_on_graph
    def product(y: Tensor) -> Tensor:
        return torch.matmul(y.float(), w)

    def work() -> Tensor:
        return torch.matmul(product(torch.matmul(x, w)).float(), w)

    autocast = within(lambda: torch.autocast("cuda", dtype=torch.bfloat16), torch.no_grad)
    engine = CUDASegmentEngine()
    graph = BreakableCUDAGraph(engine)

    def capture() -> Tensor:
        with engine.warming_up():
            work()
        with BreakableCUDAGraphCapture(graph):
            return work()

    result = autocast(capture)
    x.neg_()
    graph.replay()
    assert torch.equal(result, autocast(work))


def test_a_cast_of_a_capture_is_neither_older_nor_younger_than_the_capture() -> None:
    layer, x = nn.Linear(16, 16, device="cuda"), torch.randn(4, 16, device="cuda")
    graph = BreakableCUDAGraph(CUDASegmentEngine())
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        expected = layer(x)
        with BreakableCUDAGraphCapture(graph):
            y = layer(x)
        assert torch.equal(layer(x), expected)
        layer.weight.neg_()
        graph.replay()
        torch.clear_autocast_cache()
        assert torch.equal(y, layer(x))
