"""Open a GGUF file of llama.cpp; transformers de-quantises it.

Needs the extra ``gguf`` (transformers, accelerate and gguf), imported on use. What transformers drops without a word is
read here or refused: RoPE scaling, and tensors that its Llama does not have.
"""

from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama.checkpoint import Checkpoint, listed
from bcg_llama.config import LlamaConfig

_LAYER = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
_OPTIONAL = {"output.weight", "rope_freqs.weight"}


def open_gguf(path: Path, dtype: torch.dtype | None) -> Checkpoint:
    """De-quantise a whole file on the CPU, to float32 unless ``dtype`` says otherwise.

    Raises CheckpointError when the extra is not installed, and for files that are no Llama, broken, or more than this
    library can serve.
    """
    try:
        from gguf import GGUFReader
        from transformers import LlamaForCausalLM
    except ImportError as error:
        raise _needs(path, error.name) from error
    if find_spec("accelerate") is None:
        raise _needs(path, "accelerate")
    dtype = dtype or torch.float32
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{path}: not a complete GGUF file: {error}") from error
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{path}: architecture is {architecture!r}: only 'llama' can be loaded"
        )
    _check_names(path, reader)
    rope = _rope_parameters(path, reader)
    divisors = next((t.data for t in reader.tensors if t.name == "rope_freqs.weight"), None)
    try:
        with redirect_stderr(StringIO()):  # progress bars of its own, also into logs
            model = LlamaForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=dtype
            )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: transformers cannot read it: {error}") from error
    raw = {**model.config.to_dict(), "quantization_config": None, "rope_parameters": rope}
    config = LlamaConfig.from_hf(raw)
    if divisors is not None:
        divided = replace(config.rope, divisors=tuple(float(value) for value in divisors))
        config = replace(config, rope=divided)
    state: dict[str, Tensor] = model.state_dict()

    def read() -> Iterator[tuple[str, Tensor]]:
        yield from state.items()

    return Checkpoint(
        path=path,
        config=config,
        dtype=dtype,
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        tensors=read,
    )


def _needs(path: Path, package: str | None) -> CheckpointError:
    return CheckpointError(
        f"{path}: reading GGUF needs {package}: install the extra 'gguf', as in pip install '.[gguf]'"
    )


def _check_names(path: Path, reader: Any) -> None:
    """Refuse missing tensors, which transformers makes up, and unknown ones, which it drops."""
    layers = range(_field(reader, "llama.block_count") or 0)
    needed = {f"blk.{layer}.{name}.weight" for layer in layers for name in _LAYER}
    needed |= {"token_embd.weight", "output_norm.weight"}
    found = {tensor.name for tensor in reader.tensors}
    if missing := needed - found:
        raise CheckpointError(f"{path}: {listed('missing tensor', missing)}")
    if extra := found - needed - _OPTIONAL:
        raise CheckpointError(
            f"{path}: {listed('tensor', extra)} that a Llama in GGUF does not have"
        )


def _rope_parameters(path: Path, reader: Any) -> dict[str, Any]:
    """Return the RoPE of a GGUF header in Hugging Face spelling."""
    theta = _field(reader, "llama.rope.freq_base")
    kind = _field(reader, "llama.rope.scaling.type") or "none"
    parameters = {"rope_theta": 10000.0 if theta is None else theta}
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{path}: RoPE scaling is {kind!r}; possible are none, linear and yarn"
        )
    original = _field(reader, "llama.rope.scaling.original_context_length")
    return {
        **parameters,
        "rope_type": kind,
        "factor": _field(reader, "llama.rope.scaling.factor"),
        "original_max_position_embeddings": original,
    }


def _field(reader: Any, key: str) -> Any:
    """Return the value of a header field; None when it is missing."""
    field = reader.fields.get(key)
    return None if field is None else field.contents()
