"""Open a Hugging Face directory: ``config.json`` beside safetensors, in one file or in shards."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama.checkpoint import Checkpoint, needed_shapes
from bcg_llama.config import LlamaConfig
from bcg_llama.fields import read_json
from bcg_llama.hf_keys import unknown_keys
from bcg_llama.names import EMBEDDING, renamed
from bcg_llama.safetensors_files import StoredTensor, read_headers, read_tensors

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""What weights may be stored as, by its name in safetensors."""


def open_hf_directory(directory: Path) -> Checkpoint:
    """Read configuration and headers, not the weights; raises CheckpointError for what is missing or broken."""
    path = directory / "config.json"
    raw = read_json(path)
    headers, notes = read_headers(directory)
    _check_dtypes(directory, headers)
    try:
        config = LlamaConfig.from_hf(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    try:
        names = renamed(headers, needed_shapes(config), tied=config.tie_word_embeddings)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    tensors = {names[name]: header for name, header in headers.items()}

    def read() -> Iterator[tuple[str, Tensor]]:
        return ((names[name], tensor) for name, tensor in read_tensors(headers))

    if unknown := unknown_keys(raw):
        notes += (
            f"{path}: nothing here reads {', '.join(unknown)}: if that changes the model, its results are wrong; "
            "compare some with those of another implementation",
        )
    stored = tensors[EMBEDDING].dtype if EMBEDDING in tensors else "F32"
    return Checkpoint(
        path=directory,
        config=config,
        dtype=_configured_dtype(raw) or DTYPES[stored],
        shapes={name: header.shape for name, header in tensors.items()},
        tensors=read,
        notes=notes,
    )


def _check_dtypes(directory: Path, headers: Mapping[str, StoredTensor]) -> None:
    odd = [(name, each.dtype) for name, each in headers.items() if each.dtype not in DTYPES]
    if odd:
        name, dtype = odd[0]
        raise CheckpointError(
            f"{directory}: {len(odd)} tensors are not stored as {', '.join(DTYPES)}, first {name} ({dtype}); "
            "quantised weights cannot be loaded"
        )


def _configured_dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that transformers 5 calls ``dtype`` and transformers 4 ``torch_dtype``, if it is named."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    possible = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name is not None and (not isinstance(name, str) or name not in possible):
        raise CheckpointError(f"dtype is {name!r}; possible are {', '.join(possible)}")
    return possible.get(name) if name is not None else None
