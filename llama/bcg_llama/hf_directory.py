"""Open a Hugging Face directory: ``config.json`` beside safetensors, in one file or in shards."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama.checkpoint import EMBEDDING, Checkpoint
from bcg_llama.config import LlamaConfig

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""What weights may be stored as, by its name in safetensors."""


def open_hf_directory(directory: Path) -> Checkpoint:
    """Read configuration and headers, not the weights; raises CheckpointError for what is missing or broken."""
    raw = _read_json(directory / "config.json")
    files = _weight_files(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    stored: dict[str, str] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                header = tensors.get_slice(name)
                shapes[name] = tuple(header.get_shape())
                stored[name] = header.get_dtype()
    if odd := {name: dtype for name, dtype in stored.items() if dtype not in DTYPES}:
        name, dtype = next(iter(odd.items()))
        raise CheckpointError(
            f"{directory}: {len(odd)} tensors are not stored as {', '.join(DTYPES)}, first {name} ({dtype}); "
            "quantised weights cannot be loaded"
        )

    def read() -> Iterator[tuple[str, Tensor]]:
        for file in files:
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)

    return Checkpoint(
        path=directory,
        config=_configuration(directory / "config.json", raw),
        dtype=_configured_dtype(raw) or DTYPES[stored.get(EMBEDDING, "F32")],
        shapes=shapes,
        tensors=read,
    )


def _configuration(path: Path, raw: Mapping[str, Any]) -> LlamaConfig:
    try:
        return LlamaConfig.from_hf(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _configured_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that transformers 5 calls ``dtype`` and transformers 4 ``torch_dtype``, if it is named."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    possible = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name is not None and (not isinstance(name, str) or name not in possible):
        raise CheckpointError(f"dtype is {name!r}; possible are {', '.join(possible)}")
    return possible.get(name) if name is not None else None


def _weight_files(directory: Path) -> list[Path]:
    """Return the files that hold weights, all of which exist."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        found = sorted(path.name for path in directory.iterdir())
        raise CheckpointError(
            f"{directory}: neither {single.name} nor {index.name}; found {', '.join(found)}. "
            "Only safetensors can be loaded: convert other formats with transformers' save_pretrained"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map that names the file of each tensor")
    names = set(map(str, weight_map.values()))
    if outside := sorted(name for name in names if name != Path(name).name):
        raise CheckpointError(f"{index}: {outside[0]!r} is no file of this directory")
    files = [directory / name for name in sorted(names)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{directory}: missing {len(missing)} of {len(files)} files that {index.name} names: "
            f"{', '.join(missing)}"
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(value).__name__}")
    return value


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a safetensors file; what is wrong with it becomes a CheckpointError that names it."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a complete safetensors file: {error}") from error
