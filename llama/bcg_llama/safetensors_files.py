"""The tensors of a directory, each from the one file that counts for it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama.checkpoint import listed
from bcg_llama.fields import read_json


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Describe a tensor without reading it.

    Attributes:
        file: the file that counts for it.
        shape: its sizes.
        dtype: its type, by safetensors' name.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_headers(directory: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the tensors of ``directory`` by their stored names, and notes on what is left out.

    Of shards, the file that the index names for a tensor counts, whatever the others hold. Raises CheckpointError for
    files and tensors that are missing.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        both = f"{directory}: {single.name} is read, and the shards of {index.name} are not"
        return _headers(single), (both,) if index.is_file() else ()
    if not index.is_file():
        found = sorted(path.name for path in directory.iterdir())
        raise CheckpointError(
            f"{directory}: neither {single.name} nor {index.name}; found {', '.join(found)}. "
            "Only safetensors can be loaded: convert other formats with transformers' save_pretrained"
        )
    files = _files_by_tensor(index)
    shards = {file: _headers(directory / file) for file in sorted(set(files.values()))}
    if lacking := {name: file for name, file in files.items() if name not in shards[file]}:
        raise CheckpointError(
            f"{index}: {listed('tensor', (_whereabouts(name, shards, file) for name, file in lacking.items()))}"
        )
    tensors = {name: shards[file][name] for name, file in files.items()}
    return tensors, tuple(_left_out(index, shards, files))


def read_tensors(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``tensors`` one by one, file by file; each is a view of a mapped file."""
    by_file = sorted(tensors, key=lambda name: tensors[name].file)
    for file, names in groupby(by_file, key=lambda name: tensors[name].file):
        with _open(file) as handle:
            for name in names:
                yield name, handle.get_tensor(name)


def _files_by_tensor(index: Path) -> dict[str, str]:
    """Return which file counts for each tensor; all of them exist."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map that names the file of each tensor")
    files = {str(name): str(file) for name, file in weight_map.items()}
    names = sorted(set(files.values()))
    if outside := [name for name in names if name != Path(name).name]:
        raise CheckpointError(f"{index}: {outside[0]!r} is no file of this directory")
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(
            f"{index.parent}: missing {len(missing)} of {len(names)} files that {index.name} names: "
            f"{', '.join(missing)}"
        )
    return files


def _whereabouts(name: str, shards: Mapping[str, Mapping[str, StoredTensor]], file: str) -> str:
    holders = [other for other, held in shards.items() if name in held]
    found = f"; found in {', '.join(holders)}" if holders else ""
    return f"{name} is not in {file}{found}"


def _left_out(
    index: Path, shards: Mapping[str, Mapping[str, StoredTensor]], files: Mapping[str, str]
) -> Iterator[str]:
    """Yield a note for each file that holds copies of other files' tensors, or tensors that the index does not name."""
    for file, held in shards.items():
        copies = [name for name in held if files.get(name, file) != file]
        if copies:
            yield (
                f"{index.parent / file}: left out as {index.name} takes them from other files: "
                f"{listed('tensor', copies)}"
            )
        if unnamed := held.keys() - files.keys():
            yield (
                f"{index.parent / file}: left out as {index.name} does not name them: "
                f"{listed('tensor', unnamed)}"
            )


def _headers(file: Path) -> dict[str, StoredTensor]:
    with _open(file) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
        return {
            name: StoredTensor(file=file, shape=tuple(each.get_shape()), dtype=each.get_dtype())
            for name, each in slices.items()
        }


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a safetensors file; what is wrong with it becomes a CheckpointError that names it."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file}: not a complete safetensors file: {error}") from error
