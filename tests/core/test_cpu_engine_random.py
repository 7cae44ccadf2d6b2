"""Random numbers in segments of the emulator: drawn anew at each replay, from generators that the engine knows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bcg_core import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    CaptureError,
    CPUSegmentEngine,
    eager_on_graph,
)

Capture = Callable[..., Any]


@pytest.fixture(autouse=True)
def drawn_before() -> None:
    """Bring the default generator into a state that no seed leads to."""
    torch.rand(1)


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(8),
    "randn": lambda x: torch.randn(8),
    "randint": lambda x: torch.randint(0, 1000, (8,)),
    "randperm": lambda x: torch.randperm(8),
    "rand_like": lambda x: torch.rand_like(x),
    "normal_": lambda x: torch.empty(8).normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full((64,), 0.5)),
    "multinomial": lambda x: torch.multinomial(x, 4),
    "dropout": lambda x: F.dropout(x, 0.5),
    "exponential_": lambda x: torch.empty(8).exponential_(),
    "default_generator": lambda x: torch.rand(8, generator=torch.default_generator),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_random_numbers_are_those_that_eager_draws(
    capture: Capture, draw: Callable[[Tensor], Tensor]
) -> None:
    x = torch.ones(64)
    graph, drawn = capture(draw, x)
    torch.manual_seed(5)
    graph.replay()
    torch.manual_seed(5)
    assert torch.equal(drawn, draw(x))


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_random_numbers_differ_from_replay_to_replay(
    capture: Capture, draw: Callable[[Tensor], Tensor]
) -> None:
    graph, drawn = capture(draw, torch.ones(64))
    torch.manual_seed(5)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(drawn, first)


# Generators


def capture_with(
    generators: list[torch.Generator], draw: Callable[[], Tensor]
) -> tuple[BreakableCUDAGraph, Tensor]:
    graph = BreakableCUDAGraph(CPUSegmentEngine(generators=generators))
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        drawn = draw()
    return graph, drawn


def test_a_generator_of_the_engine_is_advanced_by_replays() -> None:
    random = torch.Generator().manual_seed(3)
    graph, drawn = capture_with([random], lambda: torch.rand(4, generator=random))
    eager = torch.Generator().manual_seed(3)
    graph.replay()
    assert torch.equal(drawn, torch.rand(4, generator=eager))
    graph.replay()
    assert torch.equal(drawn, torch.rand(4, generator=eager))


DRAWS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "rand": lambda random: torch.rand(4, generator=random),
    "normal_": lambda random: torch.empty(4).normal_(generator=random),
    "multinomial": lambda random: torch.multinomial(torch.ones(4), 2, generator=random),
    "bernoulli": lambda random: torch.bernoulli(torch.ones(4), generator=random),
    "randperm": lambda random: torch.randperm(4, generator=random),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_generator_that_the_engine_does_not_know_is_refused(
    capture: Capture, draw: Callable[[torch.Generator], Tensor]
) -> None:
    random = torch.Generator()
    with pytest.raises(CaptureError, match=r"does not know.*pass it to the engine \(generators="):
        capture(draw, random)


def test_a_generator_may_be_used_in_a_break(capture: Capture) -> None:
    random = torch.Generator().manual_seed(3)
    graph, drawn = capture(eager_on_graph(lambda: torch.rand(4, generator=random)))
    random.manual_seed(3)
    graph.replay()
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_a_generator_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        device = torch.device("cuda", 0)

    with pytest.raises(ValueError, match="a generator of cuda:0 cannot be used in segments on"):
        CPUSegmentEngine(generators=[Elsewhere()])  # type: ignore[list-item]


# Seeding

SEEDS: dict[str, Callable[[], Any]] = {
    "manual_seed": lambda: torch.manual_seed(7),
    "seed": lambda: torch.seed(),
    "default_generator": lambda: torch.default_generator.manual_seed(7),
    "set_rng_state": lambda: torch.set_rng_state(torch.Generator().manual_seed(7).get_state()),
}


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_seeding_in_a_segment_is_refused(capture: Capture, seed: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match="seeded or its state set inside a segment"):
        capture(lambda: (seed(), torch.ones(2) + 1))


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_seeding_before_a_draw_is_refused_at_the_draw(
    capture: Capture, seed: Callable[[], Any]
) -> None:
    reached: list[str] = []

    def run() -> None:
        seed()
        reached.append("seeded")
        torch.rand(2)
        reached.append("drawn")

    with pytest.raises(CaptureError, match="seeded"):
        capture(run)
    assert reached == ["seeded"]


def test_seeding_with_the_seed_that_is_there_is_refused_after_a_draw(capture: Capture) -> None:
    torch.manual_seed(7)
    torch.rand(1)
    with pytest.raises(CaptureError, match="seeded"):
        capture(lambda: torch.manual_seed(7))


def test_captures_of_two_threads_do_not_take_each_other_for_seeding() -> None:
    both = Barrier(2, timeout=10)

    def draw() -> Tensor:
        both.wait()
        drawn = torch.rand(2)
        both.wait()
        return drawn

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(capture_with, [], draw) for _ in range(2)]
    assert all(result.result()[0].captured for result in results)


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_refused_seeding_has_no_effect(capture: Capture, seed: Callable[[], Any]) -> None:
    before = torch.get_rng_state()
    with pytest.raises(CaptureError):
        capture(seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failed_segment_leaves_the_generator_as_it_was(graph: BreakableCUDAGraph) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), BreakableCUDAGraphCapture(graph):
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_seeding_for_a_while_is_refused(capture: Capture) -> None:
    def run() -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return torch.rand(2)

    with pytest.raises(CaptureError, match="fork_rng"):
        capture(run)


def test_seeding_a_generator_of_the_engine_is_refused() -> None:
    random = torch.Generator()

    def run() -> Tensor:
        random.manual_seed(3)
        return torch.rand(4, generator=random)

    with pytest.raises(CaptureError, match="seeded"):
        capture_with([random], run)


def test_seeding_in_a_break_is_allowed_and_done_at_each_replay(capture: Capture) -> None:
    seed = eager_on_graph(lambda: (torch.manual_seed(7), None)[1])
    graph, drawn = capture(lambda: (torch.rand(2), seed(), torch.rand(2))[2])
    graph.replay()
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(2))


def test_an_end_of_a_capture_takes_back_no_draw_outside_of_segments(
    engine: CPUSegmentEngine,
) -> None:
    torch.manual_seed(7)
    with engine.capturing():
        engine.begin()
        engine.end()
        drawn = torch.rand(2)
        engine.abort()
    assert not torch.equal(drawn, torch.rand(2))


def test_seeding_between_captures_is_allowed(engine: CPUSegmentEngine) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        graph = BreakableCUDAGraph(engine)
        with torch.no_grad(), BreakableCUDAGraphCapture(graph):
            torch.rand(2)
        assert graph.captured


def test_after_a_refused_seeding_the_engine_captures(engine: CPUSegmentEngine) -> None:
    with pytest.raises(CaptureError), BreakableCUDAGraphCapture(BreakableCUDAGraph(engine)):
        torch.manual_seed(7)
    graph = BreakableCUDAGraph(engine)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        torch.rand(2)
    assert graph.captured


# Models with such faults


class Seeds:
    """A model that seeds in its forward, so that all batches get the same noise."""

    def __init__(self, inner: Any) -> None:
        self.spec, self.inner = inner.spec, inner

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
        torch.manual_seed(7)
        x_TD: Tensor = self.inner.forward(input_ids_T, positions_T, ctx)
        return x_TD + self.noise(x_TD)

    def noise(self, x_TD: Tensor) -> Tensor:
        return torch.randn_like(x_TD)

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        logits_BV: Tensor = self.inner.compute_logits(hidden_BD)
        return logits_BV


class DrawsFromItsOwn(Seeds):
    """A model that draws from a generator of its own."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.random = torch.Generator()

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: Any) -> Tensor:
        x_TD: Tensor = self.inner.forward(input_ids_T, positions_T, ctx)
        return x_TD + self.noise(x_TD)

    def noise(self, x_TD: Tensor) -> Tensor:
        return torch.randn(x_TD.shape, generator=self.random)


@pytest.mark.parametrize(
    ("model", "message"),
    [(Seeds, "a random generator was seeded"), (DrawsFromItsOwn, "its engine does not know")],
    ids=["seeds", "draws-from-its-own"],
)
def test_a_model_with_randomness_that_a_replay_would_lose_is_refused(
    make_runner: Callable[..., Any], toy_model: type[Any], model: type[Seeds], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        make_runner(model=model(toy_model()))
