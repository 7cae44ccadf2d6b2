"""Load a Llama and its tokenizer from a directory, a GGUF file or the Hugging Face hub."""

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bcg_core.ambient import neutrally
from bcg_core.errors import CheckpointError
from bcg_llama.checkpoint import CheckpointWarning
from bcg_llama.gguf_file import open_gguf
from bcg_llama.hf_directory import open_hf_directory
from bcg_llama.model import LlamaModel
from bcg_llama.weights import LlamaWeights

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model"]


@neutrally("load_llama")
def load_llama(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
    fuse: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LlamaModel:
    """Load a Llama from a checkpoint.

    Tensors of a directory go to ``device`` one by one, so that memory peaks at one copy there and one tensor on the
    host; a GGUF file is de-quantised on the host as a whole. Raises CheckpointError, and says what to do, for anything
    that is missing, broken, of the wrong shape, or that changes results and is not served. Warns with a
    CheckpointWarning of what was left out, and of settings that are unknown but sound as if they changed results.

    Args:
        path: a Hugging Face directory (``config.json`` and safetensors), a ``.gguf`` file, or the ``org/name`` of a
            model on the hub, which is downloaded unless a directory of that name exists.
        dtype: of weights and activations; None takes what the configuration names, or else what is stored (float32
            for GGUF).
        device: where the model will live.
        max_positions: most positions to make a RoPE table for; the model's own limit stays if it is lower.
        fuse: compile the element-wise functions; None does so on CUDA only.
        progress: called with the number of tensors loaded and their total.
    """
    if max_positions is not None and max_positions < 1:
        raise CheckpointError(f"max_positions is {max_positions}, expected at least 1")
    local, device = _resolve(path), torch.device(device)
    checkpoint = open_gguf(local, dtype) if local.is_file() else open_hf_directory(local)
    checkpoint.check()
    for note in checkpoint.notes:
        warnings.warn(note, CheckpointWarning, stacklevel=2)
    config = checkpoint.config
    if max_positions is not None:
        config = replace(config, max_positions=min(max_positions, config.max_positions))
    weights = LlamaWeights.empty(config, dtype=dtype or checkpoint.dtype, device=device)
    checkpoint.copy_to(weights, progress)
    return LlamaModel(weights, fuse=fuse)


def load_tokenizer(path: str | Path) -> Any:
    """Return the ``transformers`` tokenizer of what ``load_llama`` takes.

    Raises CheckpointError when transformers (for GGUF also gguf) is not installed, or finds no tokenizer.
    """
    local = _resolve(path)
    try:
        from transformers import AutoTokenizer

        if local.is_file():
            return AutoTokenizer.from_pretrained(str(local.parent), gguf_file=local.name)
        return AutoTokenizer.from_pretrained(str(local))
    except ImportError as error:
        extra = "gguf" if local.is_file() else "hf"
        raise CheckpointError(
            f"{path}: a tokenizer needs {error.name or 'more packages'} ({error}): "
            f"install the extra {extra!r}, as in pip install '.[{extra}]'"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: transformers finds no tokenizer: {error}") from error


def _resolve(path: str | Path) -> Path:
    """Return the local directory or GGUF file that ``path`` means, downloading it from the hub if need be."""
    local = Path(path)
    if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
        return local
    if local.is_file():
        raise CheckpointError(
            f"{path}: is a file but no .gguf; give the directory that holds config.json and the safetensors"
        )
    if isinstance(path, str) and _HUB_ID.fullmatch(path) and local.suffix != ".gguf":
        return _download(path)
    raise CheckpointError(
        f"{path}: no such directory or .gguf file (a model on the hub is written as org/name)"
    )


def _download(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise CheckpointError(
            f"{hub_id}: no such directory, and a download from the hub needs {error.name}: "
            "install the extra 'hf', as in pip install '.[hf]'"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{hub_id}: no such directory, and the download from the hub failed: {error}"
        ) from error
