"""Every way a checkpoint can be wrong is a CheckpointError that says what and where."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bcg_core.errors import CheckpointError
from bcg_llama import PRESETS, load_llama, load_tokenizer, random_llama

Q0 = "model.layers.0.self_attn.q_proj.weight"


MESSAGES = {
    "missing-tensor": f"1 missing tensor: {Q0}",
    "many-missing-tensors": r"12 missing tensors: .*mlp.down_proj.weight.* and 4 more",
    "missing-head": r"1 missing tensor: lm_head.weight; is the head tied",
    "extra-tensor": "1 tensor: model.layers.0.self_attn.q_proj.bias that the configured",
    "wrong-shape": rf"1 wrong shape: {Q0} is \(3, 128\), expected \(512, 128\)",
    "tied-head-of-wrong-shape": r"lm_head.weight is \(3, 128\), expected \(1024, 128\)",
    "tied-head-differs": "lm_head.weight and model.embed_tokens.weight differ",
    "integer-weights": rf"1 tensors are not stored as BF16, F16, F32, first {Q0} \(I8\)",
    "unknown-rope": "unknown rope type 'spiral'; possible are default, linear",
    "dynamic-rope": "depends on the length of each request",
    "unknown-dtype": "dtype is 'float8_e4m3fn'; possible are bfloat16, float16, float32",
    "dtype-is-a-list": r"dtype is \['bfloat16'\]; possible are",
    "other-model": "config.json: model_type is 'gpt2'",
    "index-names-another-directory": r"'../model-00001.safetensors' is no file of this directory",
    "missing-shard": "missing 1 of 3 files .* names: model-00002.safetensors",
    "truncated-shard": "model-00002.safetensors: not a complete safetensors file",
    "truncated-file": "model.safetensors: not a complete safetensors file",
    "empty-file": "model.safetensors: not a complete safetensors file",
    "index-is-no-json": "model.safetensors.index.json: not JSON",
    "index-without-map": "model.safetensors.index.json: no weight_map",
    "no-config": "no config.json; found model.safetensors$",
    "config-is-no-json": "config.json: not JSON",
    "config-is-a-list": "config.json: expected an object, found list",
    "no-weights": "neither model.safetensors nor .* found config.json, pytorch_model.bin",
}


def broken(write: Callable[..., Path], damage: str) -> Path:
    """Write a tiny model with one kind of damage."""
    model = random_llama(PRESETS["tiny-tied" if damage.startswith("tied") else "tiny"])
    wide = torch.zeros(3, 128)
    whole: dict[str, dict[str, Any]] = {
        "missing-tensor": {"tensors": {Q0: None}},
        "many-missing-tensors": {
            "tensors": {n: None for n, _ in model.named_tensors() if "mlp" in n}
        },
        "missing-head": {"tensors": {"lm_head.weight": None}},
        "extra-tensor": {"tensors": {"model.layers.0.self_attn.q_proj.bias": torch.zeros(512)}},
        "wrong-shape": {"tensors": {Q0: wide}},
        "tied-head-of-wrong-shape": {"tensors": {"lm_head.weight": wide}},
        "tied-head-differs": {"tensors": {"lm_head.weight": model.weights.head_VD + 1}},
        "integer-weights": {"tensors": {Q0: torch.zeros(512, 128, dtype=torch.int8)}},
        "unknown-rope": {"config": {"rope_parameters": {"rope_type": "spiral"}}},
        "dynamic-rope": {"config": {"rope_parameters": {"rope_type": "dynamic"}}},
        "unknown-dtype": {"config": {"dtype": "float8_e4m3fn"}},
        "dtype-is-a-list": {"config": {"dtype": ["bfloat16"]}},
        "other-model": {"config": {"model_type": "gpt2", "architectures": None}},
    }
    path = write(
        model, shards=3 if "shard" in damage or "index" in damage else 1, **whole.get(damage, {})
    )
    index = path / "model.safetensors.index.json"
    if damage == "missing-shard":
        (path / "model-00002.safetensors").unlink()
    elif damage == "truncated-shard":
        shard = path / "model-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "truncated-file":
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "empty-file":
        (path / "model.safetensors").write_bytes(b"")
    elif damage == "index-is-no-json":
        index.write_text("{")
    elif damage == "index-without-map":
        index.write_text("{}")
    elif damage == "index-names-another-directory":
        index.write_text(json.dumps({"weight_map": {Q0: "../model-00001.safetensors"}}))
    elif damage == "no-config":
        (path / "config.json").unlink()
    elif damage == "config-is-no-json":
        (path / "config.json").write_text("model_type: llama")
    elif damage == "config-is-a-list":
        (path / "config.json").write_text("[]")
    elif damage == "no-weights":
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
    return path


@pytest.mark.parametrize(("damage", "message"), MESSAGES.items(), ids=MESSAGES)
def test_broken_directory(damage: str, message: str, write_directory: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_llama(broken(write_directory, damage))


def test_the_error_names_the_directory(write_directory: Any) -> None:
    path = broken(write_directory, "missing-tensor")
    with pytest.raises(CheckpointError, match=str(path)):
        load_llama(path)


@pytest.mark.parametrize("load", [load_llama, load_tokenizer])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        pytest.param("/nowhere/at/all", "no such directory or .gguf file", id="directory"),
        pytest.param("/nowhere/model.gguf", "no such directory or .gguf file", id="gguf"),
        pytest.param("models/model.gguf", "no such directory or .gguf file", id="relative-gguf"),
        pytest.param(Path("models/llama"), "no such directory or .gguf file", id="path-object"),
        pytest.param(__file__, "is a file but no .gguf", id="other-file"),
    ],
)
def test_path_that_is_no_checkpoint(
    load: Callable[[str | Path], Any], path: str | Path, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("load", [load_llama, load_tokenizer])
def test_hub_id_without_huggingface_hub_gives_an_install_hint(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install '.\[hf\]'"):
        load("org/name")


def test_failed_download_says_that_the_directory_is_missing_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fail(*args: object, **kwargs: object) -> str:
        raise hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"org/name: no such directory.*failed: .*offline"):
        load_llama("org/name")


def test_hub_id_is_downloaded(write_directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    downloads = {"org/name": str(write_directory(random_llama(PRESETS["tiny"])))}
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: downloads[name])
    assert load_llama("org/name").config == PRESETS["tiny"]


def test_directory_wins_over_a_hub_id(
    write_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_directory(random_llama(PRESETS["tiny"]))
    monkeypatch.chdir(tmp_path.parent.parent)
    assert load_llama(f"{tmp_path.parent.name}/{tmp_path.name}").config == PRESETS["tiny"]


def test_max_positions_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_positions is 0"):
        load_llama(tmp_path, max_positions=0)
