"""What a caller has switched on in torch leaks nowhere: every call in every state.

Shape letters: T bucket (padded) tokens, R real tokens, B requests, D model dim.
"""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bcg_core import (
    AmbientStateError,
    BatchError,
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    Chunk,
    CPUSegmentEngine,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
    break_graph,
    create_backend,
    eager_on_graph,
)
from bcg_core.debug import StreamGuard, WatchedEngine, WatchedRunner
from bcg_harness.testing.ambient_states import MODES, PUT_ASIDE, State, fingerprint

Make = Callable[..., Any]
SameBits = Callable[[Any, Any], None]

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


@pytest.fixture
def sensitive_model(toy_model: type[Any]) -> type[Any]:
    """Return a model that trusts the state it is run in: products that autocast casts, factories that name nothing."""

    class Sensitive(toy_model):
        def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
            x_TD = super().forward(input_ids_T, positions_T, ctx)
            scale_D = torch.linspace(0.5, 1.5, x_TD.shape[1])
            scaled_TD = (x_TD * scale_D).to(x_TD.dtype)
            return torch.matmul(scaled_TD, self.qkv_DX[0][:, :16]).to(x_TD.dtype)

        def compute_logits(self, hidden_BD: Tensor) -> Tensor:
            return torch.matmul(hidden_BD, self.embedding_VD.t()) * torch.ones(1)

    return Sensitive


@pytest.fixture
def host_arrays_backend(toy_backend: type[Any]) -> type[Any]:
    """Return a backend whose host arrays and products trust the state they are made in."""

    class HostArrays(toy_backend):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.rows_R = torch.zeros(self.limits.max_tokens)

        def init_forward_metadata(self, batch: PrefillBatch) -> PrefillBatch:
            self.rows_R[: batch.num_tokens] = torch.arange(batch.num_tokens) / batch.num_tokens
            assert torch.tensor(batch.kv_lens).tolist() == list(batch.kv_lens)
            assert torch.get_default_device() == torch.device("cpu")
            metadata: PrefillBatch = super().init_forward_metadata(batch)
            return metadata

        def forward(self, q_RNH: Tensor, *args: Any) -> Tensor:
            out_RNH: Tensor = super().forward(q_RNH, *args)
            return out_RNH.mul_(1 + self.rows_R[: q_RNH.shape[0], None, None])

    return HostArrays


@dataclass
class Scene:
    """A runner of the two, and batches for it."""

    model: Any
    backend: Any
    kv_cache: PagedKVCache
    runner: PrefillRunner

    def chunks(self) -> list[Chunk]:
        return [
            Chunk(token_ids=[3, 1, 4, 1, 5], sequence=KVSequence()),
            Chunk(token_ids=[9, 2], sequence=KVSequence()),
        ]

    def batch(self) -> PrefillBatch:
        """Return a batch of a request behind a prefix and a new one."""
        first, second = self.chunks()
        self.runner.prefill(PrefillBatch.from_chunks([first], self.kv_cache), mode="eager")
        again = Chunk(token_ids=[6, 5, 3], sequence=first.sequence)
        return PrefillBatch.from_chunks([again, second], self.kv_cache)

    def serve(self, mode: Mode = Mode.BREAKABLE) -> tuple[Tensor, ...]:
        """Prefill, and return all there is to see."""
        return self.results(self.batch(), mode)

    def results(self, batch: PrefillBatch, mode: Mode) -> tuple[Tensor, ...]:
        result = self.runner.prefill(batch, mode=mode)
        return (
            result.hidden_RD,
            result.logits_BV,
            result.next_tokens_B,
            self.kv_cache.storage_L2PSKH,
        )


@pytest.fixture
def make_scene(
    sensitive_model: type[Any], host_arrays_backend: type[Any], make_backend: Make
) -> Callable[[], Scene]:
    def make(*, captured: bool = True) -> Scene:
        model = sensitive_model()
        kv_cache = PagedKVCache(model.spec, num_pages=32, page_size=4)
        backend = make_backend(host_arrays_backend)
        runner = PrefillRunner(model, kv_cache, backend, buckets=(8, 16), max_requests=8)
        if captured:
            runner.capture()
        return Scene(model, backend, kv_cache, runner)

    return make


def clean(call: Callable[[], Any]) -> Any:
    return call()


# What is done in the state; all of it returns tensors, computed in the state or after it


def capture(make: Make, state: State) -> Any:
    scene = make(captured=False)
    state(scene.runner.capture)
    return scene.serve()


def prefill(mode: Mode) -> Callable[[Make, State], Any]:
    def call(make: Make, state: State) -> Any:
        scene = make()
        batch = scene.batch()
        return state(lambda: scene.results(batch, mode))

    return call


def from_chunks(make: Make, state: State) -> Any:
    scene = make()
    chunks = scene.chunks()
    batch = state(lambda: PrefillBatch.from_chunks(chunks, scene.kv_cache))
    return arrays(batch), scene.results(batch, Mode.BREAKABLE)


def build(make: Make, state: State) -> Any:
    scene = make()
    arguments: dict[str, Any] = {
        "input_ids": [3, 1, 4, 1, 5],
        "new_lens": [3, 2],
        "prefix_lens": [4, 0],
        "page_table": [[1, 2], [3]],
        "kv_cache": scene.kv_cache,
    }
    batch = state(lambda: PrefillBatch.build(**arguments))
    return arrays(batch), scene.results(batch, Mode.BREAKABLE)


def arrays(batch: PrefillBatch) -> Any:
    host = (batch.input_ids_R, batch.positions_R, batch.slot_mapping_R, batch.page_table_BW)
    return host, tuple(vars(batch.on_device).values()), batch.kv_slots


def make_cache(make: Make, state: State) -> Any:
    scene = make(captured=False)
    cache = state(lambda: PagedKVCache(scene.model.spec, num_pages=32, page_size=4))
    cache.storage_L2PSKH.zero_()  # an inference tensor would refuse
    scene.runner = PrefillRunner(scene.model, cache, scene.backend, buckets=(8,), max_requests=8)
    scene.runner.capture()
    scene.kv_cache = cache
    return scene.serve()


def make_runner(make: Make, state: State) -> Any:
    scene = make(captured=False)
    model, cache, backend = scene.model, scene.kv_cache, scene.backend
    scene.runner = state(lambda: PrefillRunner(model, cache, backend, buckets=(8,), max_requests=8))
    scene.runner.workspace.boundary.fill_(0)  # an inference tensor would refuse
    scene.runner.capture()
    return scene.serve()


def make_backend_itself(make: Make, state: State) -> Any:
    scene = make()
    spec, limits = scene.backend.spec, scene.backend.limits
    backend = state(
        lambda: create_backend(type(scene.backend), spec, limits, scene.kv_cache.device)
    )
    backend.rows_R.zero_()
    scene.runner.use_backend(backend)
    return scene.serve()


def use_backend(make: Make, state: State) -> Any:
    scene = make()
    other = type(scene.backend)(scene.backend.spec, scene.backend.limits, scene.kv_cache.device)
    state(lambda: scene.runner.use_backend(other))
    return scene.serve()


CALLS: dict[str, Callable[[Make, State], Any]] = {
    "capture": capture,
    "replay": prefill(Mode.BREAKABLE),
    "eager": prefill(Mode.EAGER),
    "padded_eager": prefill(Mode.PADDED_EAGER),
    "from_chunks": from_chunks,
    "build": build,
    "kv_cache": make_cache,
    "runner": make_runner,
    "backend": make_backend_itself,
    "use_backend": use_backend,
}
NAMES = {
    "capture": "capture",
    "replay": "prefill",
    "eager": "prefill",
    "padded_eager": "prefill",
    "from_chunks": "PrefillBatch.from_chunks",
    "build": "PrefillBatch.build",
    "kv_cache": "PagedKVCache",
    "runner": "PrefillRunner",
    "backend": "create_backend",
    "use_backend": "use_backend",
}
"""What a refusal calls them."""


# The table


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("state", PUT_ASIDE.values(), ids=PUT_ASIDE)
def test_a_call_has_the_bits_of_one_in_a_clean_state(
    make_scene: Make, assert_same_bits: SameBits, state: State, call: Callable[[Make, State], Any]
) -> None:
    assert_same_bits(call(make_scene, state), call(make_scene, clean))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_under_a_mode_of_the_caller_is_refused_by_name(
    make_scene: Make, mode: str, call: str
) -> None:
    words = rf"^{NAMES[call]} under {mode}, a torch (dispatch|function) mode: .* Leave the mode for"
    with pytest.raises(AmbientStateError, match=words):
        CALLS[call](make_scene, MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_prefill_leaves_the_runner_and_the_batch_as_they_were(
    make_scene: Make, assert_same_bits: SameBits, mode: str
) -> None:
    scene = make_scene()
    batch = scene.batch()
    with pytest.raises(AmbientStateError):
        MODES[mode](lambda: scene.runner.prefill(batch))
    assert [sequence.cached for sequence in batch.sequences] == [5, 0]
    assert_same_bits(scene.results(batch, Mode.BREAKABLE), make_scene().serve())


# Restoring


class MistakeError(Exception):
    """What user code raises here."""


@pytest.mark.parametrize("failing", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("name", ["capture", "replay", "eager", "from_chunks", "use_backend"])
@pytest.mark.parametrize("state", PUT_ASIDE)
def test_the_state_of_the_caller_is_what_it_was(
    make_scene: Make, state: str, name: str, failing: bool
) -> None:
    scene = make_scene(captured=name in ("replay", "use_backend"))
    other = type(scene.backend)(scene.backend.spec, scene.backend.limits, scene.kv_cache.device)
    batch = scene.batch()
    if failing:

        def fail(*args: Any) -> Any:
            raise MistakeError

        scene.backend.before_forward = scene.model.forward = other.before_forward = fail
    calls: dict[str, Callable[[], Any]] = {
        "capture": scene.runner.capture,
        "replay": lambda: scene.runner.prefill(batch),
        "eager": lambda: scene.runner.prefill(batch, mode="eager"),
        "from_chunks": lambda: PrefillBatch.from_chunks(
            [Chunk(token_ids=fail if failing else [1], sequence=KVSequence())],  # type: ignore[arg-type]
            scene.kv_cache,
        ),
        "use_backend": lambda: scene.runner.use_backend(other),
    }

    def compare() -> tuple[Any, Any, bool]:
        before, raised = fingerprint(), False
        try:
            calls[name]()
        except (MistakeError, BatchError):
            raised = True
        return before, fingerprint(), raised

    before, after, raised = PUT_ASIDE[state](compare)
    assert after == before
    assert raised is failing


def test_sample_sees_the_state_of_the_caller(make_scene: Make) -> None:
    scene = make_scene()
    seen: list[Any] = []

    def sample(logits_BV: Tensor) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.zeros(1).dtype, torch.zeros(1).device))
        return logits_BV.argmax(-1)

    batch = scene.batch()
    PUT_ASIDE["all_at_once"](lambda: scene.runner.prefill(batch, sample=sample))
    assert seen == [(True, torch.float64, torch.device("meta"))]


def test_backend_and_model_see_a_clean_state(make_scene: Make) -> None:
    scene = make_scene()
    seen: list[Any] = []
    scene.backend.before_forward = lambda layer: seen.append(
        (torch.is_autocast_enabled("cpu"), torch.zeros(1).dtype, torch.get_default_device().type)
    )
    batch = scene.batch()
    seen.clear()
    PUT_ASIDE["all_at_once"](lambda: scene.runner.prefill(batch))
    assert seen == [(False, torch.float32, "cpu")] * 2


# Bare graphs: what is captured is the caller's, as the caller has it


class Bare:
    """Code that is sensitive in a segment and in a break."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.x = torch.randn(4, 8, generator=random)
        self.w = torch.randn(8, 8, generator=random)

    def __call__(self) -> tuple[Tensor, Tensor]:
        y = torch.matmul(self.x, self.w)
        z, _, _ = self.product(y)
        return y, torch.matmul(z.float(), self.w) + torch.linspace(0, 1, 8, device="cpu")

    @eager_on_graph
    def product(self, y: Tensor) -> tuple[Tensor, str, str]:
        z = torch.matmul(y.float(), self.w) * torch.linspace(0, 1, 8, device="cpu")
        return z, str(torch.empty(0).device), str(torch.empty(0).dtype)

    def captured(self) -> tuple[BreakableCUDAGraph, tuple[Tensor, Tensor]]:
        graph = BreakableCUDAGraph(CPUSegmentEngine())
        with torch.no_grad(), BreakableCUDAGraphCapture(graph):
            results = self()
        return graph, results


BARE = {name: state for name, state in PUT_ASIDE.items() if name != "torch_compile"}


@pytest.mark.parametrize("state", BARE.values(), ids=BARE)
def test_a_bare_graph_replays_outside_as_it_was_captured_inside(
    assert_same_bits: SameBits, state: State
) -> None:
    bare = Bare()
    graph, results = state(bare.captured)
    bare.x.neg_()
    graph.replay()
    with torch.no_grad():
        assert_same_bits(results, state(bare))


@pytest.mark.parametrize("state", PUT_ASIDE.values(), ids=PUT_ASIDE)
def test_a_bare_graph_replays_inside_as_it_was_captured_outside(
    assert_same_bits: SameBits, state: State
) -> None:
    bare = Bare()
    graph, results = bare.captured()
    bare.x.neg_()

    def replay() -> tuple[Any, Any]:
        before = fingerprint()
        graph.replay()
        return before, fingerprint()

    before, after = state(replay)
    assert before == after
    assert_same_bits(results, bare())


@pytest.mark.parametrize("mode", MODES)
def test_a_bare_capture_under_a_mode_of_the_caller_is_refused_by_name(mode: str) -> None:
    with pytest.raises(AmbientStateError, match=f"^a capture under {mode}, a torch"):
        MODES[mode](Bare().captured)


@pytest.mark.parametrize("mode", MODES)
def test_a_bare_replay_under_a_mode_of_the_caller_is_refused_by_name(mode: str) -> None:
    graph, _ = Bare().captured()
    with pytest.raises(
        AmbientStateError, match=f"^BreakableCUDAGraph.replay under {mode}, a torch"
    ):
        MODES[mode](graph.replay)


def test_a_bare_capture_inside_a_compiled_function_is_refused() -> None:
    with pytest.raises(AmbientStateError, match=r"Put torch\.compiler\.disable on the function"):
        PUT_ASIDE["torch_compile"](Bare().captured)


def test_a_refused_bare_capture_leaves_the_graph_to_be_captured() -> None:
    graph = BreakableCUDAGraph(CPUSegmentEngine())

    def try_capture() -> None:
        with BreakableCUDAGraphCapture(graph):
            break_graph()

    with pytest.raises(AmbientStateError):
        MODES["SeesOperations"](try_capture)
    try_capture()
    assert graph.captured


# Casts that autocast remembers


def test_a_cast_that_was_remembered_before_a_capture_is_no_part_of_it(
    assert_same_bits: SameBits,
) -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    graph = BreakableCUDAGraph(CPUSegmentEngine())
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
        with BreakableCUDAGraphCapture(graph):
            y = layer(x)
        layer.weight.neg_()
        graph.replay()
        torch.clear_autocast_cache()
        assert_same_bits(y, layer(x))


def test_a_cast_that_was_captured_is_not_remembered_after_it() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with BreakableCUDAGraphCapture(BreakableCUDAGraph(CPUSegmentEngine())):
            layer(x)
        assert layer(x).isfinite().all()


# What is compiled on purpose


def test_what_a_model_compiles_stays_compiled_below_a_compiled_caller(make_scene: Make) -> None:
    graphs: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    scene = make_scene()
    batch = scene.batch()
    scene.model.compute_logits = torch.compile(scene.model.compute_logits, backend=compiler)
    PUT_ASIDE["torch_compile"](lambda: scene.runner.prefill(batch))
    assert len(graphs) == 1


def test_without_graph_breaks_torch_names_what_it_cannot_compile(make_scene: Make) -> None:
    scene = make_scene()
    batch = scene.batch()
    prefill = torch.compile(lambda: scene.runner.prefill(batch), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"PrefillRunner\.prefill"):
        prefill()


# A state that a model sets itself


@pytest.mark.parametrize("state", ["autocast_bfloat16", "default_float64"])
def test_a_break_in_a_state_of_the_model_replays_in_it(
    make_scene: Make, assert_same_bits: SameBits, state: str
) -> None:
    def make() -> Scene:
        scene: Scene = make_scene(captured=False)
        forward = scene.model.forward
        scene.model.forward = lambda *args: PUT_ASIDE[state](lambda: forward(*args))
        return scene

    replaying, eager = make(), make()
    replaying.runner.capture()
    seen: list[Any] = []
    replaying.backend.before_forward = lambda layer: seen.append(fingerprint())
    replayed = replaying.serve()
    expected = PUT_ASIDE[state](fingerprint)
    for name in ("autocast", "default dtype"):
        assert all(found[name] == expected[name] for found in seen)
    assert_same_bits(replayed, eager.serve(Mode.PADDED_EAGER))


# Precision of products


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision")
def test_a_replay_under_another_precision_than_at_capture_is_refused(make_scene: Make) -> None:
    scene = make_scene()
    batch = scene.batch()
    torch.set_float32_matmul_precision("medium")
    words = (
        r"fp32_precision was ieee and is bf16 .*Set it back, or release\(\) and capture\(\) again"
    )
    with pytest.raises(AmbientStateError, match=words):
        scene.runner.prefill(batch)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.PADDED_EAGER], ids=lambda mode: mode.value)
def test_eager_takes_the_precision_of_its_call(make_scene: Make, mode: Mode) -> None:
    scene = make_scene()
    batch = scene.batch()
    torch.set_float32_matmul_precision("medium")
    assert scene.runner.prefill(batch, mode=mode).logits_BV.isfinite().all()


@pytest.mark.usefixtures("precision")
def test_a_new_capture_takes_the_precision_of_its_call(make_scene: Make) -> None:
    scene = make_scene()
    torch.set_float32_matmul_precision("medium")
    scene.runner.release()
    scene.runner.capture()
    assert scene.serve()[0].isfinite().all()


@pytest.mark.usefixtures("precision")
def test_saying_what_is_so_already_is_no_other_precision(make_scene: Make) -> None:
    scene = make_scene()
    torch.set_float32_matmul_precision("highest")
    assert scene.serve()[0].isfinite().all()


# The library's own modes


def test_a_watched_runner_works_as_ever(make_scene: Make, assert_same_bits: SameBits) -> None:
    scene = make_scene(captured=False)
    scene.runner = WatchedRunner(
        scene.model, scene.kv_cache, scene.backend, buckets=(8, 16), max_requests=8
    )
    scene.runner.capture()
    scene.serve()


def test_what_a_break_builds_is_built_below_the_modes_of_a_capture(kv_cache: PagedKVCache) -> None:
    built: list[PrefillBatch] = []

    @eager_on_graph
    def build_one() -> None:
        chunk = Chunk(token_ids=[1, 2], sequence=KVSequence())
        built.append(PrefillBatch.from_chunks([chunk], kv_cache))

    graph = BreakableCUDAGraph(WatchedEngine(CPUSegmentEngine(), [StreamGuard()]))
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        build_one()
    graph.replay()
    assert [batch.num_tokens for batch in built] == [2, 2]


# A model that was made under another default type is not what its spec says


def test_a_model_that_was_made_under_a_default_of_float64_is_named_by_torch_and_bucket(
    toy_model: type[Any], make_runner: Make
) -> None:
    model = PUT_ASIDE["default_float64"](toy_model)
    with pytest.raises(RuntimeError, match="dtype") as caught:
        make_runner(model=model)
    assert "raised in warm-up of bucket 16" in caught.value.__notes__


def test_the_error_can_be_pickled() -> None:
    error = AmbientStateError("capture under SeesOperations")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
