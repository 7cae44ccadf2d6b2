"""The automatic choice: only what is right, the fastest of it, made once and explained."""

from collections.abc import Callable
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_backends.auto import AutoBackend
from bcg_backends.sdpa import SDPABackend
from bcg_backends.trial import Shape, Trial, shapes_of
from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    BackendLoadError,
    BackendRegistry,
    BackendUnavailableError,
    PrefillBatch,
)

CPU = torch.device("cpu")
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, page_size=4, scale=0.25
)
LIMITS = BackendLimits(max_tokens=64, max_requests=8, max_context=64, num_pages=32)


class Good(SDPABackend):
    name = "good"


class Slow(SDPABackend):
    name = "slow"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        sleep(0.002)
        return super().forward(*args, **kwargs)


class SlowBehindPrefix(SDPABackend):
    name = "slow-behind-prefix"

    def init_forward_metadata(self, batch: PrefillBatch) -> Any:
        sleep(0.1 * any(batch.prefix_lens))
        return super().init_forward_metadata(batch)


class Wrong(SDPABackend):
    name = "wrong"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 1.001


class Raising(SDPABackend):
    name = "raising"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no kernel image")


class Missing(SDPABackend):
    name = "missing"

    @classmethod
    def unavailable(cls) -> str | None:
        return "pip install missing"


class Toys(BackendRegistry):
    """Register these classes under their names; None stands for an entry point that does not load."""

    def __init__(self, *classes: type[AttentionBackend] | None) -> None:
        super().__init__({})
        self._classes = {cls.name if cls else "broken": cls for cls in classes}

    def names(self) -> list[str]:
        return list(self._classes)

    def load(self, name: str) -> type[AttentionBackend]:
        cls = self._classes[name]
        if cls is None:
            raise BackendLoadError(name, "entry point failed")
        return cls


def auto(*classes: type[AttentionBackend] | None) -> AutoBackend:
    return AutoBackend(SPEC, LIMITS, CPU, registry=Toys(*classes))


def warmed(*classes: type[AttentionBackend] | None) -> AutoBackend:
    backend = auto(*classes)
    trials = [Trial(shape, SPEC, CPU) for shape in shapes_of(scratch(), LIMITS)]
    backend.warm_up([trial.batch for trial in trials[:2]], lambda batch: None)
    return backend


def scratch() -> list[PrefillBatch]:
    cache = Trial(Shape(tokens=1, requests=1, prefix_len=0), SPEC, CPU).kv_cache
    return [
        PrefillBatch.scratch([size], cache, prefix_len=prefix)
        for size in (16, 4)
        for prefix in (0, 4)
    ]


def batch(tokens: int, requests: int = 1, prefix_len: int = 0) -> PrefillBatch:
    return Trial(Shape(tokens=tokens, requests=requests, prefix_len=prefix_len), SPEC, CPU).batch


def test_the_fastest_right_backend_is_chosen() -> None:
    backend = warmed(Slow, Good)
    assert {choice.name for choice in backend.choices} == {"good"}


@pytest.mark.parametrize("bad", [Wrong, Raising])
def test_a_backend_that_is_wrong_is_never_chosen_however_fast(bad: type[AttentionBackend]) -> None:
    backend = warmed(bad, Slow)
    assert {choice.name for choice in backend.choices} == {"slow"}
    assert all(bad.name in choice.wrong for choice in backend.choices)


def test_the_choice_depends_on_the_shape() -> None:
    backend = warmed(Slow, SlowBehindPrefix)
    plain, behind = backend.choose(batch(16)), backend.choose(batch(12, prefix_len=4))
    assert (plain.name, behind.name) == ("slow-behind-prefix", "slow")


def test_before_warm_up_the_first_candidate_serves() -> None:
    assert auto(Slow, Good).choose(batch(3)).name == "slow"


@pytest.mark.parametrize(("tokens", "nearest"), [(3, 4), (4, 4), (5, 16), (16, 16), (40, 16)])
def test_a_batch_goes_by_the_nearest_shape_that_holds_it(tokens: int, nearest: int) -> None:
    shapes = [Shape(tokens=size, requests=1, prefix_len=0) for size in (4, 16)]
    chosen = min(shapes, key=lambda shape: shape.distance(batch(tokens)))
    assert chosen.tokens == nearest


def test_shapes_with_a_prefix_are_preferred_behind_a_prefix() -> None:
    shapes = [Shape(tokens=16, requests=1, prefix_len=length) for length in (0, 4)]
    chosen = min(shapes, key=lambda shape: shape.distance(batch(16, prefix_len=8)))
    assert chosen.prefix_len == 4


def test_shapes_cover_sizes_many_requests_and_a_prefix() -> None:
    found = {(s.tokens, s.requests, s.prefix_len) for s in shapes_of(scratch(), LIMITS)}
    assert found == {
        (tokens, requests, prefix)
        for tokens, most in ((16, 8), (4, 4))
        for requests in (1, most)
        for prefix in (0, 4)
    }


def test_notes_say_who_serves_what_and_why() -> None:
    notes = "\n".join(warmed(Good, Wrong, Missing, None).notes())
    assert "good (good" in notes
    assert "wrong is wrong: error" in notes
    assert "left out missing" in notes
    assert "pip install missing" in notes
    assert "left out broken" in notes


def test_without_any_candidate_it_is_unavailable_and_says_why() -> None:
    with pytest.raises(BackendUnavailableError, match="pip install missing"):
        auto(Missing)


def test_it_does_not_choose_itself() -> None:
    assert list(auto(AutoBackend, Good).candidates) == ["good"]


def test_nobody_right_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError, match="no candidate is right"):
        warmed(Wrong)


@pytest.mark.parametrize("prefix_len", [0, 5])
def test_results_are_those_of_the_chosen_backend(prefix_len: int) -> None:
    backend = warmed(Good)
    trial = Trial(Shape(tokens=9, requests=2, prefix_len=prefix_len), SPEC, CPU)
    ours = trial.run(backend, 1).clone()
    assert torch.equal(ours, trial.run(Good(SPEC, LIMITS, CPU), 1))


def test_a_result_of_a_backend_that_does_not_write_out_ends_up_there() -> None:
    backend, trial = warmed(Good), Trial(Shape(tokens=9, requests=2, prefix_len=0), SPEC, CPU)
    metadata = backend.init_forward_metadata(trial.batch)
    given = trial.q_RNH, trial.k_RKH, trial.v_RKH, trial.kv_cache, 0, metadata
    out_RNH = torch.full_like(trial.q_RNH, float("nan"))
    assert not Good.capabilities.supports_out
    assert backend.forward(*given, out_RNH) is out_RNH
    assert torch.equal(out_RNH, trial.run(Good(SPEC, LIMITS, CPU), 1))


@pytest.mark.parametrize("fault", [lambda out: out * 1.001, lambda out: out * float("nan")])
def test_a_trial_finds_faults(fault: Callable[[Tensor], Tensor]) -> None:
    class Faulty(SDPABackend):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return fault(super().forward(*args, **kwargs))

    trial = Trial(Shape(tokens=9, requests=2, prefix_len=4), SPEC, CPU)
    assert trial.fault(Good(SPEC, LIMITS, CPU)) is None
    assert trial.fault(Faulty(SPEC, LIMITS, CPU)) is not None
