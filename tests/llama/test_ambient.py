"""Weights and tables do not depend on what the caller has switched on in torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import AmbientStateError
from bcg_harness.testing.ambient_states import MODES, PUT_ASIDE, State, fingerprint
from bcg_llama import LlamaModel, RopeConfig, load_llama, random_llama
from bcg_llama.config import LlamaConfig
from bcg_llama.rope_table import cos_sin_table

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=32,
)

ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig(rope_type="linear", factor=2.0),
    "llama3": RopeConfig(rope_type="llama3", factor=8.0, original_max_positions=16),
    "yarn": RopeConfig(rope_type="yarn", factor=4.0, original_max_positions=16),
    "divisors": RopeConfig(divisors=(1.0, 2.0)),
}


def tensors(model: LlamaModel) -> dict[str, Tensor]:
    tables = {"cos": model._cos_SF, "sin": model._sin_SF}
    return {**dict(model.named_tensors()), **tables}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different
    assert {t.dtype for t in found.values()} == {t.dtype for t in expected.values()}
    assert not any(t.is_inference() for t in found.values())


@pytest.mark.parametrize("state", PUT_ASIDE.values(), ids=PUT_ASIDE)
def test_random_weights_are_those_of_a_clean_state(state: State) -> None:
    assert_same(tensors(state(lambda: random_llama(CONFIG))), tensors(random_llama(CONFIG)))


@pytest.mark.parametrize("state", PUT_ASIDE.values(), ids=PUT_ASIDE)
def test_loaded_weights_are_those_of_a_clean_state(
    write_directory: Callable[..., Path], state: State
) -> None:
    directory = write_directory(random_llama(CONFIG), shards=2)
    assert_same(tensors(state(lambda: load_llama(directory))), tensors(load_llama(directory)))


@pytest.mark.parametrize("make", [random_llama, load_llama], ids=lambda make: make.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_making_a_model_under_a_mode_of_the_caller_is_refused_by_name(
    write_directory: Callable[..., Path], mode: str, make: Callable[..., LlamaModel]
) -> None:
    given: Any = CONFIG if make is random_llama else write_directory(random_llama(CONFIG))
    words = f"^{make.__name__} under {mode}, a torch (dispatch|function) mode"
    with pytest.raises(AmbientStateError, match=words):
        MODES[mode](lambda: make(given))


@pytest.mark.parametrize("failing", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("state", PUT_ASIDE.values(), ids=PUT_ASIDE)
def test_loading_leaves_the_state_of_the_caller(
    write_directory: Callable[..., Path], state: State, failing: bool
) -> None:
    path = write_directory(random_llama(CONFIG))
    if failing:
        (path / "model.safetensors").write_bytes(b"")

    def load() -> tuple[Any, Any, bool]:
        before, raised = fingerprint(), False
        try:
            load_llama(path)
        except ValueError:
            raised = True
        return before, fingerprint(), raised

    before, after, raised = state(load)
    assert before == after
    assert raised is failing


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize(
    "state", ["set_default_device", "with_device", "default_float64", "default_bfloat16"]
)
def test_rope_tables_say_themselves_where_and_what_they_are(state: str, rope: RopeConfig) -> None:
    def table() -> tuple[Tensor, Tensor]:
        return cos_sin_table(rope, head_dim=4, max_positions=32, device=torch.device("cpu"))

    found, expected = PUT_ASIDE[state](table), table()
    assert [(t.dtype, t.device) for t in found] == [(t.dtype, t.device) for t in expected]
    assert all(map(torch.equal, found, expected))
