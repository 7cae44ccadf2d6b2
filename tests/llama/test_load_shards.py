"""Of shards, the file that the index names for a tensor counts, whatever the others hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama import PRESETS, CheckpointWarning, LlamaModel, load_llama, random_llama

NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model() -> LlamaModel:
    return random_llama(PRESETS["tiny"])


@pytest.fixture
def sharded(model: LlamaModel, write_directory: Any) -> Path:
    """Return a directory of three shards."""
    path: Path = write_directory(model, shards=3)
    return path


def files_of(directory: Path) -> dict[str, str]:
    files: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return files


def other_files(directory: Path, name: str) -> list[str]:
    return sorted({*files_of(directory).values()} - {files_of(directory)[name]})


def change(file: Path, **tensors: Tensor | None) -> None:
    """Store ``tensors`` in a shard, or take out those that are None."""
    held = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file)


def rewrite(directory: Path, **files: str | None) -> None:
    """Have the index name other files, or none."""
    kept = {name: file for name, file in {**files_of(directory), **files}.items() if file}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": kept}))


@pytest.mark.parametrize("place", [0, -1], ids=["first-shard", "last-shard"])
def test_an_outdated_copy_in_another_shard_does_not_count(
    place: int, model: LlamaModel, sharded: Path
) -> None:
    file = other_files(sharded, NORM)[place]
    change(sharded / file, **{NORM: torch.zeros(128)})
    message = f"{file}: left out as {INDEX} takes them from other files: 1 tensor: {NORM}"
    with pytest.warns(CheckpointWarning, match=message):
        loaded = load_llama(sharded)
    assert torch.equal(loaded.weights.norm_D, model.weights.norm_D)


def test_an_outdated_copy_of_another_shape_does_not_count(model: LlamaModel, sharded: Path) -> None:
    change(sharded / other_files(sharded, NORM)[-1], **{NORM: torch.zeros(3, dtype=torch.int8)})
    with pytest.warns(CheckpointWarning, match="left out"):
        loaded = load_llama(sharded)
    assert torch.equal(loaded.weights.norm_D, model.weights.norm_D)


def test_a_tensor_that_its_file_lacks_is_named_with_both_files(sharded: Path) -> None:
    named, holder = files_of(sharded)[NORM], other_files(sharded, NORM)[0]
    change(sharded / named, **{NORM: None})
    change(sharded / holder, **{NORM: torch.zeros(128)})
    message = f"{INDEX}: 1 tensor: {NORM} is not in {named}; found in {holder}$"
    with pytest.raises(CheckpointError, match=message):
        load_llama(sharded)


def test_a_tensor_that_no_file_holds_is_named(sharded: Path) -> None:
    change(sharded / files_of(sharded)[NORM], **{NORM: None})
    with pytest.raises(
        CheckpointError, match=f"1 tensor: {NORM} is not in model-0000..safetensors$"
    ):
        load_llama(sharded)


def test_a_needed_tensor_in_no_index_is_named_with_its_file(sharded: Path) -> None:
    file = files_of(sharded)[NORM]
    rewrite(sharded, **{NORM: None})
    message = f"1 missing tensor: {NORM}; .*{file}: left out as {INDEX} does not name them: 1 tensor: {NORM}"
    with pytest.raises(CheckpointError, match=message):
        load_llama(sharded)


def test_a_spare_tensor_in_no_index_is_left_out_with_a_warning(sharded: Path) -> None:
    file = files_of(sharded)[NORM]
    change(sharded / file, spare=torch.zeros(1))
    with pytest.warns(CheckpointWarning, match=f"{file}: left out .* does not name them: .* spare"):
        load_llama(sharded)


def test_one_file_beside_shards_is_what_is_read(model: LlamaModel, sharded: Path) -> None:
    named = {name: tensor.clone() for name, tensor in model.named_tensors()}
    save_file({**named, NORM: torch.zeros(128)}, sharded / "model.safetensors")
    with pytest.warns(CheckpointWarning, match=f"model.safetensors is read, .* {INDEX} are not"):
        loaded = load_llama(sharded)
    assert torch.equal(loaded.weights.norm_D, torch.zeros(128))


def test_shards_without_spare_tensors_load_without_a_word(sharded: Path) -> None:
    load_llama(sharded)  # a warning would be an error
