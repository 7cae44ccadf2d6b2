"""Open a GGUF file of llama.cpp; transformers de-quantises it.

Needs the extra ``gguf`` (transformers, accelerate and gguf), imported on use. What transformers drops without a word is
read here or refused: fields of the header, tensors that its Llama does not have, and the other parts of a split file.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
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
from bcg_llama.gguf_header import read_header, require_sizes, unknown_fields

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
    _refuse_parts(path, reader)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{path}: architecture is {architecture!r}: only 'llama' can be loaded"
        )
    header = {
        key.removeprefix("llama."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("llama.")
    }
    try:
        config = _configuration(header, {tensor.name: tensor for tensor in reader.tensors})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    try:
        with redirect_stderr(StringIO()):  # progress bars of its own, also into logs
            model = LlamaForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=dtype
            )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: transformers cannot read it: {error}") from error
    state: dict[str, Tensor] = model.state_dict()

    def read() -> Iterator[tuple[str, Tensor]]:
        yield from state.items()

    unknown = unknown_fields(header)
    note = (
        f"{path}: nothing here reads {', '.join(unknown)}: if that changes the model, its results are wrong; compare "
        "some with those of llama.cpp"
    )
    return Checkpoint(
        path=path,
        config=config,
        dtype=dtype,
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        tensors=read,
        notes=(note,) if unknown else (),
    )


def _configuration(header: Mapping[str, Any], tensors: Mapping[str, Any]) -> LlamaConfig:
    """Return what header and tensors describe; raises CheckpointError when that is not exactly one Llama."""
    require_sizes(header)
    _check_names(range(header["block_count"]), tensors.keys())
    config = read_header(
        header,
        vocab_size=_rows(tensors["token_embd.weight"]),
        query_rows=_rows(tensors["blk.0.attn_q.weight"]),
        tied="output.weight" not in tensors,
    )
    if (divisors := tensors.get("rope_freqs.weight")) is None:
        return config
    values = tuple(float(value) for value in divisors.data)
    return replace(config, rope=replace(config.rope, divisors=values))


def _rows(tensor: Any) -> int:
    return int(tensor.shape[-1])  # GGUF has sizes backwards


def _refuse_parts(path: Path, reader: Any) -> None:
    """Refuse a part of a split file: transformers would make up the tensors of all other parts."""
    count = _field(reader, "split.count") or 1
    if count < 2:
        return
    number = (_field(reader, "split.no") or 0) + 1
    name = path.name.removesuffix(f"-{number:05}-of-{count:05}.gguf")
    parts = [path.with_name(f"{name}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    here = f"missing here: {', '.join(missing)}" if missing else "all are here"
    raise CheckpointError(
        f"{path}: is part {number} of {count} of a split GGUF file ({here}): merge them with "
        f"'llama-gguf-split --merge {parts[0].name} {name}.gguf', and load {name}.gguf"
    )


def _needs(path: Path, package: str | None) -> CheckpointError:
    return CheckpointError(
        f"{path}: reading GGUF needs {package}: install the extra 'gguf', as in pip install '.[gguf]'"
    )


def _check_names(layers: range, found: AbstractSet[str]) -> None:
    """Refuse missing tensors, which transformers makes up, and unknown ones, which it drops."""
    needed = {f"blk.{layer}.{name}.weight" for layer in layers or range(1) for name in _LAYER}
    needed |= {"token_embd.weight", "output_norm.weight"}
    if missing := needed - found:
        raise CheckpointError(listed("missing tensor", missing))
    if extra := found - needed - _OPTIONAL:
        raise CheckpointError(f"{listed('tensor', extra)} that a Llama in GGUF does not have")


def _field(reader: Any, key: str) -> Any:
    """Return the value of a header field; None when it is missing."""
    field = reader.fields.get(key)
    return None if field is None else field.contents()
