"""Numbers carry their context."""

import json
import platform
import subprocess
from typing import Any

import pytest
import torch

from bcg_harness import Environment
from bcg_harness.environment import describe_model, driver_version, dtype_name, model_shape
from bcg_llama import LlamaModel


def test_the_environment_names_hardware_and_versions() -> None:
    environment = Environment.of(torch.device("cpu"))
    assert environment.engine == "CPU emulator"
    assert environment.libraries["torch"] == torch.__version__
    assert "breakable-cuda-graph" in environment.libraries
    assert environment.driver is None


def test_the_environment_names_system_and_machine_alone() -> None:
    found = Environment.of(torch.device("cpu")).platform
    assert found == f"{platform.system()} {platform.machine()}"


def test_the_environment_is_json() -> None:
    raw = Environment.of(torch.device("cpu")).to_json()
    assert json.loads(json.dumps(raw)) == raw


def test_the_environment_fits_a_line() -> None:
    line = str(Environment.of(torch.device("cpu")))
    assert line.startswith("CPU emulator, ")
    assert f"torch {torch.__version__}" in line


def test_the_driver_is_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, stdout="570.124\n570.124\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert driver_version() == "570.124"


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "nvidia-smi")],
    ids=["absent", "fails"],
)
def test_no_nvidia_smi_no_driver(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert driver_version() is None


def test_the_model_is_described_as_json(small_model: LlamaModel) -> None:
    raw = describe_model(small_model.spec)
    assert (raw["num_layers"], raw["dtype"], raw["device"]) == (2, "float32", "cpu")
    assert json.loads(json.dumps(raw)) == raw


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(
            {
                "num_layers": 16,
                "hidden_size": 2048,
                "num_heads": 32,
                "num_kv_heads": 8,
                "head_dim": 64,
            },
            "16 layers, D 2048, 32/8 heads of 64",
            id="whole",
        ),
        pytest.param({"num_layers": 16}, "16 layers, D ?, ?/? heads of ?", id="incomplete"),
    ],
)
def test_the_shape_of_a_model_is_told_in_words(model: dict[str, int], words: str) -> None:
    assert model_shape(model) == words


def test_dtypes_have_short_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
