"""Loading GGUF: weights, RoPE scaling, and files that are broken or no Llama."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama import PRESETS, load_llama, load_tokenizer, random_llama
from bcg_llama.rope_table import inverse_frequencies

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("transformers", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")

Write = Callable[..., Path]


@pytest.mark.parametrize("preset", ["tiny", "tiny-tied", "tiny-mqa", "tiny-h128"])
def test_weights_come_back(preset: str, write_gguf: Write) -> None:
    model = random_llama(PRESETS[preset])
    loaded = dict(load_llama(write_gguf(model)).named_tensors())
    assert {n for n, t in model.named_tensors() if not torch.equal(loaded[n], t)} == set()


def test_configuration_comes_back(write_gguf: Write) -> None:
    config = load_llama(write_gguf(random_llama(PRESETS["tiny"]))).config
    assert replace(config, rms_norm_eps=1e-5) == PRESETS["tiny"]


@pytest.mark.parametrize(
    ("preset", "scaling"), [("tiny-linear", ("linear", 4.0)), ("tiny-yarn", ("yarn", 8.0))]
)
def test_rope_scaling_comes_back(
    preset: str, scaling: tuple[str, float], write_gguf: Write
) -> None:
    path = write_gguf(random_llama(PRESETS[preset]), scaling=scaling)
    assert load_llama(path).config.rope == PRESETS[preset].rope


def test_llama3_scaling_comes_as_divisors(
    ids: Tensor, logits: Any, hf_logits: Any, error_of: Any, write_gguf: Write
) -> None:
    model = random_llama(PRESETS["tiny-llama3"])
    rope = model.config.rope
    unscaled = inverse_frequencies(replace(rope, rope_type="default"), 64)
    divisors = unscaled / inverse_frequencies(rope, 64)
    loaded = load_llama(write_gguf(model, tensors={"rope_freqs.weight": divisors}))
    assert error_of(logits(loaded, ids), hf_logits(model, ids)) <= 1e-4


@pytest.mark.parametrize(
    ("asked", "got"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str
)
def test_dtype(asked: torch.dtype | None, got: torch.dtype, write_gguf: Write) -> None:
    path = write_gguf(random_llama(PRESETS["tiny"]))
    assert load_llama(path, dtype=asked).spec.dtype == got


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"architecture": "gpt2"}, "architecture is 'gpt2'", id="other-model"),
        pytest.param(
            {"tensors": {"blk.1.ffn_up.weight": None}},
            "1 missing tensor: blk.1.ffn_up.weight",
            id="missing-tensor",
        ),
        pytest.param(
            {"tensors": {"blk.0.attn_q.bias": torch.zeros(512)}},
            "1 tensor: blk.0.attn_q.bias that a Llama in GGUF does not have",
            id="extra-tensor",
        ),
        pytest.param(
            {"tensors": {"blk.0.attn_norm.weight": torch.zeros(3)}},
            "transformers cannot read it",
            id="wrong-shape",
        ),
        pytest.param(
            {"tensors": {"rope_freqs.weight": torch.ones(3)}},
            "3 RoPE frequency divisors for 32 pairs",
            id="wrong-divisors",
        ),
        pytest.param({"scaling": ("longrope", 2.0)}, "RoPE scaling is 'longrope'", id="rope"),
    ],
)
def test_broken_file(changes: dict[str, Any], message: str, write_gguf: Write) -> None:
    path = write_gguf(random_llama(PRESETS["tiny"]), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_llama(path)


@pytest.mark.parametrize("size", [0, 3, 100, 5000, 100_000])
def test_truncated_file(size: int, write_gguf: Write) -> None:
    path = write_gguf(random_llama(PRESETS["tiny"]))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="not a complete GGUF file"):
        load_llama(path)


def test_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(CheckpointError, match="not a complete GGUF file"):
        load_llama(path)


@pytest.mark.parametrize("package", ["gguf", "transformers", "accelerate"])
def test_missing_package_gives_an_install_hint(
    package: str, write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(random_llama(PRESETS["tiny"]))
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"needs {package}: install the extra 'gguf', as in pip install '.\[gguf\]'"
    with pytest.raises(CheckpointError, match=message):
        load_llama(path)


def test_tokenizer_of_a_file_without_one_is_an_error(write_gguf: Write) -> None:
    path = write_gguf(random_llama(PRESETS["tiny"]))
    with pytest.raises(CheckpointError, match="finds no tokenizer"):
        load_tokenizer(path)
