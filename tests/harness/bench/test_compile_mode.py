"""Compiled pieces: the results of eager prefill, one compilation for all layers and sizes, and what torch recorded."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bcg_harness.bench import llama_pieces
from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.compile_mode import CompilePiecewise, TorchCompile
from bcg_harness.bench.llama_pieces import CompiledPieces
from bcg_harness.bench.mechanism import Recording
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.testing.mode_trial import ModeTrial, TrialStep
from bcg_llama import PRESETS, random_llama

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None,
        reason="torch.compile on the CPU needs a C++ compiler",
    ),
    # torch 2.13 warns about itself when torch.compile's default backend is first imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

# More than one layer uses the middle piece, and the largest bucket is as long as the model is wide.
MODEL = replace(PRESETS["tiny"], num_layers=3)
BUCKETS = (1, 16, 64, 128)
TOLERANCE = 1e-5

Steps = tuple[tuple[tuple[int, int], ...], ...]
COMPOSITIONS: dict[str, Steps] = {
    "single": (((0, 13),),),
    "exactly-a-bucket": (((0, 64),),),
    "as-long-as-wide": (((0, 128),),),
    "one-token": (((0, 1),),),
    "several": (((0, 20), (1, 5), (2, 30)),),
    "prefixes": (((0, 20), (1, 7)), ((0, 3), (1, 9), (2, 12))),
    "chunked": (((0, 30),), ((0, 30),), ((0, 5),)),
    "above-the-largest": (((0, 100), (1, 50)),),
}


def compilations() -> int:
    """Return how often torch.compile has compiled something in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture(scope="module")
def prepared() -> tuple[ModeTrial, int]:
    """Return a compiled trial, and how many compilations its preparation took."""
    before = compilations()
    trial = ModeTrial(random_llama(MODEL), CompilePiecewise, buckets=BUCKETS)
    return trial, compilations() - before


@pytest.fixture(scope="module")
def trial(prepared: tuple[ModeTrial, int]) -> Iterator[ModeTrial]:
    """Return the trial; whatever is compiled from now on is an error."""
    trial, _ = prepared
    trial.step(
        (99, 150)
    )  # beyond the largest bucket, pieces of their own are compiled at first use
    torch.compiler.set_stance("fail_on_recompile")
    yield trial
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module", params=COMPOSITIONS.values(), ids=COMPOSITIONS)
def step(request: pytest.FixtureRequest, trial: ModeTrial) -> TrialStep:
    """Return the last step of a composition, on sequences of its own."""
    first = 100 * (1 + list(COMPOSITIONS.values()).index(request.param))
    results = [trial.step(*((first + n, t) for n, t in requests)) for requests in request.param]
    return results[-1]


def test_hidden_states_are_those_of_eager(step: TrialStep) -> None:
    assert step.result.hidden_RD is not None
    torch.testing.assert_close(
        step.result.hidden_RD, step.hidden_RD, rtol=TOLERANCE, atol=TOLERANCE
    )


def test_logits_are_those_of_eager(step: TrialStep) -> None:
    torch.testing.assert_close(
        step.result.logits_BV, step.logits_BV, rtol=TOLERANCE, atol=TOLERANCE
    )


def test_keys_and_values_are_those_of_eager(step: TrialStep) -> None:
    # Page 0 takes the padded rows, of which the reference has none.
    torch.testing.assert_close(
        step.kv_written[:, :, 1:], step.kv_expected[:, :, 1:], rtol=TOLERANCE, atol=TOLERANCE
    )


def test_all_sizes_and_layers_share_what_is_compiled(prepared: tuple[ModeTrial, int]) -> None:
    _, count = prepared
    assert count == 2 * 3, "three pieces, for a single token and for all other counts"


@pytest.mark.parametrize(
    ("tokens", "served_by", "padded"),
    [
        (13, "bucket 16", 16),
        (64, "bucket 64", 64),
        (130, "more tokens than the largest bucket (128)", 130),
    ],
)
def test_a_batch_says_what_served_it(
    tokens: int, served_by: str, padded: int, trial: ModeTrial
) -> None:
    result = trial.mode.prefill(trial.batch((tokens + 2000, tokens)))
    assert (result.served_by, result.padded_tokens) == (served_by, padded)


def test_every_bucket_is_prepared_the_largest_first(trial: ModeTrial) -> None:
    assert [record.bucket for record in trial.setup.buckets] == [128, 64, 16, 1]


def test_a_cpu_has_no_graphs(trial: ModeTrial) -> None:
    assert trial.setup.graph_memory is None
    assert {record.segments for record in trial.setup.buckets} == {0}
    assert trial.mode.notes() == ["compiled only: CUDA graphs need a GPU"]


def test_another_backend_needs_no_other_preparation(trial: ModeTrial) -> None:
    setup = trial.mode.prepare(trial.make_backend(), "another")
    assert setup == ModeSetup(backend=NO_BACKEND, mode=CompilePiecewise.name)


# The pieces as they are, without torch.compile


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = CompiledPieces(
        head=llama_pieces.head, middle=llama_pieces.middle, tail=llama_pieces.tail
    )
    monkeypatch.setattr(CompiledPieces, "of", lambda mode: pieces)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("preset", ["tiny-bias", "tiny-tied", "tiny-odd", "tiny-yarn"])
def test_pieces_make_every_kind_of_llama(preset: str) -> None:
    step = ModeTrial(random_llama(PRESETS[preset]), CompilePiecewise).step((0, 9), (1, 20))
    torch.testing.assert_close(step.result.hidden_RD, step.hidden_RD, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("uncompiled")
def test_a_model_of_one_layer_has_no_middle() -> None:
    model = random_llama(replace(PRESETS["tiny"], num_layers=1))
    step = ModeTrial(model, CompilePiecewise).step((0, 9))
    torch.testing.assert_close(step.result.hidden_RD, step.hidden_RD, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("uncompiled")
def test_sizes_that_are_left_out_go_to_the_next_larger() -> None:
    trial = ModeTrial(
        random_llama(MODEL), lambda ground: CompilePiecewise(ground, sizes=[64]), buckets=BUCKETS
    )
    assert [record.bucket for record in trial.setup.buckets] == [64]
    assert trial.step((0, 9)).result.served_by == "bucket 64"


# What torch recorded


Recorded = tuple[TorchCompile, Recording]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Recorded]:
    """Return a function that records a forward of 4 pieces, of which torch makes so many graphs."""

    def make(graphs: int) -> Recorded:
        roots: list[SimpleNamespace] = []
        manager = SimpleNamespace(get_roots=lambda: roots)
        monkeypatch.setattr(TorchCompile, "_manager", lambda self: manager)
        mechanism = TorchCompile(torch.device("cuda"), pieces=4)

        def begin() -> None:
            if graphs and not roots:
                roots.append(SimpleNamespace(num_descendants=lambda: graphs - 1))

        return mechanism, mechanism.record(begin, lambda: None)

    return make


@pytest.mark.parametrize("graphs", [0, 4])
def test_graphs_are_counted(graphs: int, record: Callable[[int], Recorded]) -> None:
    _, recording = record(graphs)
    assert (recording.segments, recording.breaks) == (graphs, 3)


def test_a_graph_of_every_piece_needs_no_note(record: Callable[[int], Recorded]) -> None:
    mechanism, _ = record(4)
    assert mechanism.notes == []


@pytest.mark.parametrize("graphs", [0, 1, 3, 8])
def test_another_number_of_graphs_is_noted(graphs: int, record: Callable[[int], Recorded]) -> None:
    mechanism, _ = record(graphs)
    (note,) = mechanism.notes
    assert note.startswith(f"torch made {graphs} CUDA graphs of the 4 pieces")
