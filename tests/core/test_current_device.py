"""Everything that a runner does, it does while the device of its KV cache is the current one.

On a stand-in for the current device; whether kernels then go where they should, ``test_two_gpus.py`` tells.

Shape letters: B requests, D model dim, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    CPUSegmentEngine,
    PagedKVCache,
    PrefillRunner,
    create_backend,
    greedy,
    registry,
    runner,
)
from bcg_core import graph as graphs
from bcg_core.current_device import on_device
from bcg_core.workspace import Workspace

Make = Callable[..., Any]


class MistakeError(Exception):
    """What user code raises here."""


@dataclass
class Device:
    """Stand for the current device: ``here`` is whether it is the runner's, ``seen`` what each place found."""

    here: bool = False
    asked: list[torch.device] = field(default_factory=list)
    seen: dict[str, set[bool]] = field(default_factory=dict)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self.asked.append(device)
        before, self.here = self.here, True
        try:
            yield
        finally:
            self.here = before

    def look(self, place: str) -> None:
        self.seen.setdefault(place, set()).add(self.here)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    stand_in = Device()
    for module in (runner, registry, graphs):
        monkeypatch.setattr(module, "on_device", stand_in.on_device)
    return stand_in


@pytest.fixture
def looking_backend(toy_backend: type[Any], device: Device) -> type[Any]:
    """Return a backend that looks wherever it is called."""

    class Looking(toy_backend):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            device.look("constructor")
            super().__init__(*args, **kwargs)

        def warm_up(self, batches: Any, run: Any) -> None:
            device.look("warm-up")
            super().warm_up(batches, run)

        def init_bucket_metadata(self, bucket: int) -> Any:
            device.look("bucket metadata")
            return super().init_bucket_metadata(bucket)

        def init_forward_metadata(self, batch: Any) -> Any:
            device.look("metadata")
            return super().init_forward_metadata(batch)

        def forward(self, *args: Any) -> Any:
            device.look("attention")
            return super().forward(*args)

    return Looking


@pytest.fixture
def looking_model(toy_model: type[Any], device: Device) -> Any:
    """Return a model that looks wherever it is called."""

    class LookingModel(toy_model):
        def forward(self, *args: Any) -> Any:
            device.look("model")
            return super().forward(*args)

        def compute_logits(self, hidden_BD: Tensor) -> Tensor:
            device.look("head")
            logits_BV: Tensor = super().compute_logits(hidden_BD)
            return logits_BV

    return LookingModel()


@pytest.fixture
def looking_runner(
    kv_cache: PagedKVCache,
    looking_model: Any,
    looking_backend: type[Any],
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> PrefillRunner:
    """Return a runner, not yet captured, that makes its backends by name."""

    class LookingWorkspace(Workspace):
        def __init__(self, *args: Any) -> None:
            device.look("workspace")
            super().__init__(*args)

    monkeypatch.setattr(runner, "Workspace", LookingWorkspace)
    monkeypatch.setattr(registry.BackendRegistry, "load", lambda self, name: looking_backend)
    return PrefillRunner(looking_model, kv_cache, "looking", buckets=[8, 16], max_requests=8)


@pytest.fixture
def looked(looking_runner: PrefillRunner, make_batch: Make, device: Device) -> dict[str, set[bool]]:
    """Capture, replay, run eagerly, outgrow the workspace and switch; returns what each place found."""

    def sample(logits_BV: Tensor) -> Tensor:
        device.look("sampling")
        return greedy(logits_BV)

    looking_runner.capture()
    for lengths in ((3, 4), (20,)):
        looking_runner.prefill(make_batch(*lengths), sample=sample)
    looking_runner.use_backend("looking")
    looking_runner.prefill(make_batch(5))
    assert looking_runner.stats.replays == {8: 2}
    return device.seen


PLACES = [
    "constructor",
    "workspace",
    "warm-up",
    "bucket metadata",
    "metadata",
    "attention",
    "model",
    "head",
    "sampling",
]


@pytest.mark.parametrize("place", PLACES)
def test_the_caches_device_is_current_in(looked: dict[str, set[bool]], place: str) -> None:
    assert looked[place] == {True}


def test_no_other_device_is_asked_for(
    looked: dict[str, set[bool]], device: Device, kv_cache: PagedKVCache
) -> None:
    assert set(looked) == set(PLACES)
    assert set(device.asked) == {kv_cache.device}


def test_a_prefill_changes_the_device_once(
    looking_runner: PrefillRunner, make_batch: Make, device: Device
) -> None:
    looking_runner.capture()
    device.asked.clear()
    looking_runner.prefill(make_batch(5))
    assert len(device.asked) == 1


def test_a_backend_that_is_made_without_a_runner_has_its_device_current(
    looking_backend: type[Any], make_backend: Make, device: Device
) -> None:
    alike = make_backend()
    create_backend(looking_backend, alike.spec, alike.limits, torch.device("cpu"))
    assert device.seen == {"constructor": {True}}


def test_after_an_exception_the_callers_device_is_current(
    looking_runner: PrefillRunner, make_batch: Make, device: Device
) -> None:
    def fail(logits_BV: Tensor) -> Tensor:
        raise MistakeError

    with pytest.raises(MistakeError):
        looking_runner.prefill(make_batch(5), sample=fail)
    assert not device.here


def test_a_cpu_is_always_current() -> None:
    with on_device(torch.device("cpu")) as nothing:
        assert nothing is None


@pytest.mark.parametrize(
    ("device", "asked"),
    [(torch.device("cuda", 1), 1), (torch.device("cuda"), torch.device("cuda"))],
    ids=["index", "no-index"],
)
def test_torch_is_asked_for_a_cuda_device(
    device: torch.device, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda which: ("torch's", which))
    assert on_device(device) == ("torch's", asked)


def test_an_engine_of_another_device_is_refused_with_both(make_runner: Make) -> None:
    class Elsewhere(CPUSegmentEngine):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 1)

    with pytest.raises(
        ValueError, match="records work on cuda:1, but the KV cache is on cpu: make the engine with"
    ):
        make_runner(engine=Elsewhere(), captured=False)
