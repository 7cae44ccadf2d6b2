"""Tensors under other names, and models tied the other way round: as transformers loads them, or refused with words."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama import PRESETS, LlamaModel, load_llama, random_llama

Rename = Callable[[str], str]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def write_renamed(write_directory: Any) -> Callable[[LlamaModel, Rename], Path]:
    """Write a model whose tensors go by what ``rename`` makes of their names; None leaves one out."""

    def write(model: LlamaModel, rename: Rename) -> Path:
        path: Path = write_directory(model)
        named = {rename(name): tensor.clone() for name, tensor in model.named_tensors()}
        save_file(named, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return write


def only_the_head(name: str) -> str:
    return HEAD if name == EMBEDDING else name


def without_model(name: str) -> str:
    return name.removeprefix("model.")


def model_twice(name: str) -> str:
    return f"model.{name}"


def some_without_model(name: str) -> str:
    return name if "layers.1" in name else without_model(name)


@pytest.mark.parametrize(
    ("preset", "rename"),
    [
        pytest.param("tiny-tied", only_the_head, id="tied-with-only-a-head"),
        pytest.param("tiny", without_model, id="without-model"),
        pytest.param("tiny-tied", without_model, id="tied-without-model"),
        pytest.param("tiny", model_twice, id="model-twice"),
        pytest.param(
            "tiny-tied", lambda name: model_twice(only_the_head(name)), id="head-of-a-model-twice"
        ),
        pytest.param("tiny", some_without_model, id="some-without-model"),
    ],
)
def test_what_transformers_loads_is_loaded_with_its_logits(
    preset: str,
    rename: Rename,
    ids: Tensor,
    logits: Any,
    error_of: Any,
    write_renamed: Callable[[LlamaModel, Rename], Path],
) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_renamed(random_llama(PRESETS[preset]), rename)
    reference, found = transformers.LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    assert error_of(logits(load_llama(path), ids), expected) <= 1e-4


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        pytest.param(
            lambda name: f"_orig_mod.{name}",
            r"39 missing tensors: .*; 39 of them stored under names of a wrapper, such as _orig_mod.lm_head.weight for "
            r"lm_head.weight \(torch.compile: save the model that was compiled \(model._orig_mod\)\)",
            id="compiled",
        ),
        pytest.param(
            lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
            r"9 missing tensors: .*model.layers.1._orig_mod.input_layernorm.weight for .*torch.compile",
            id="compiled-layer",
        ),
        pytest.param(
            lambda name: f"module.{name}", r"DataParallel: save model.module", id="data-parallel"
        ),
        pytest.param(
            lambda name: f"_fsdp_wrapped_module.{name}",
            r"\(FSDP: save a full state dict\)",
            id="fsdp",
        ),
        pytest.param(
            lambda name: f"base_model.model.{name}", r"PEFT: save .*merge_and_unload", id="peft"
        ),
        pytest.param(
            lambda name: f"module._orig_mod.{name}",
            r"\(torch.compile: .*; DataParallel: ",
            id="compiled-data-parallel",
        ),
        pytest.param(
            lambda name: name.replace("q_proj", "q_proj.base_layer"),
            r"4 missing tensors: .*adapters that are not merged",
            id="adapters",
        ),
        pytest.param(
            lambda name: name.replace("0.self_attn.q_proj", "0.self_attention.q_proj"),
            f"1 missing tensor: {Q0}; model.layers.0.self_attention.q_proj.weight is stored, .* close to {Q0}",
            id="close",
        ),
        pytest.param(
            lambda name: f"{len(name)}/{zlib.crc32(name.encode())}",
            r"39 missing tensors: .* and 31 more; stored are 14/\d+, 17/\d+, 2./\d+, \.\.\.$",
            id="nothing-alike",
        ),
    ],
)
def test_what_transformers_would_make_up_is_refused_with_what_was_found(
    rename: Rename, message: str, write_renamed: Callable[[LlamaModel, Rename], Path]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_llama(write_renamed(random_llama(PRESETS["tiny"]), rename))


def test_an_error_about_hundreds_of_names_stays_short(
    write_renamed: Callable[[LlamaModel, Rename], Path],
) -> None:
    path = write_renamed(random_llama(PRESETS["tiny"]), lambda name: f"_orig_mod.{name}")
    with pytest.raises(CheckpointError) as caught:
        load_llama(path)
    assert len(str(caught.value)) - len(str(path)) < 700


def test_two_tensors_that_mean_one_are_refused(write_directory: Any) -> None:
    model = random_llama(PRESETS["tiny"])
    twice = {"norm.weight": torch.zeros(128)}
    with pytest.raises(CheckpointError, match=r"are both model\.norm\.weight: keep one of them"):
        load_llama(write_directory(model, tensors=twice))


def test_an_untied_model_with_only_a_head_is_refused(write_directory: Any) -> None:
    model = random_llama(PRESETS["tiny"])
    with pytest.raises(CheckpointError, match=f"1 missing tensor: {EMBEDDING}$"):
        load_llama(write_directory(model, tensors={EMBEDDING: None}))
