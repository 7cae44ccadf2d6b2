"""Fixtures of the harness's own tests."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch

from bcg_core import ENTRY_POINT_GROUP, registry
from bcg_llama import PRESETS, LlamaModel, random_llama


@pytest.fixture(scope="package", autouse=True)
def single_thread() -> Iterator[None]:
    """Keep torch to one thread: tiny models gain nothing from more, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def small_model() -> LlamaModel:
    """Return the smallest model with more than one layer and with grouped heads; tests must not change it."""
    return random_llama(replace(PRESETS["tiny"], num_layers=2))


@pytest.fixture
def only_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes these the only registered backends."""

    def register(**values: str) -> None:
        points = {
            name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()
        }
        monkeypatch.setattr(registry, "_installed", lambda: points)

    return register
