"""Fields of a GGUF header that change results, and parts of split files: served or refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core.errors import CheckpointError
from bcg_llama import PRESETS, CheckpointWarning, RopeConfig, load_llama, random_llama
from bcg_llama.gguf_header import read_header, require_sizes, unknown_fields

Write = Callable[..., Path]

HEADER: dict[str, Any] = {
    "context_length": 2048,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
SERVED_YARN = RopeConfig(rope_type="yarn", factor=8.0, original_max_positions=2048)


def read(**fields: Any) -> Any:
    return read_header({**HEADER, **fields}, vocab_size=100, query_rows=64, tied=False)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        pytest.param({}, RopeConfig(), id="nothing"),
        pytest.param({"rope.freq_base": 5e5}, RopeConfig(theta=5e5), id="base"),
        pytest.param(
            {"rope.scaling.factor": 4.0},
            RopeConfig(rope_type="linear", factor=4.0),
            id="factor-without-a-type",
        ),
        pytest.param(
            {"rope.scale_linear": 4.0},
            RopeConfig(rope_type="linear", factor=4.0),
            id="old-key",
        ),
        pytest.param(
            {"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0},
            RopeConfig(rope_type="linear", factor=4.0),
            id="new-key-before-old",
        ),
        pytest.param({"rope.scaling.factor": 0.0}, RopeConfig(), id="factor-0-is-none"),
        pytest.param({"rope.scaling.factor": 1.0}, RopeConfig(), id="factor-1-is-none"),
        pytest.param({"rope.scaling.type": "linear"}, RopeConfig(), id="linear-without-a-factor"),
        pytest.param(
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, RopeConfig(), id="none"
        ),
        pytest.param(YARN, SERVED_YARN, id="yarn"),
        pytest.param(
            {**YARN, "rope.scaling.original_context_length": 256},
            replace(SERVED_YARN, original_max_positions=256),
            id="original-context",
        ),
        pytest.param(
            {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            replace(SERVED_YARN, beta_fast=16.0, beta_slow=2.0),
            id="betas",
        ),
        pytest.param(
            {**YARN, "rope.scaling.yarn_ext_factor": 1.0}, SERVED_YARN, id="all-of-the-ramp"
        ),
        pytest.param(
            {"rope.scaling.original_context_length": 256, "rope.scaling.finetuned": True},
            RopeConfig(),
            id="history",
        ),
    ],
)
def test_rope_is_what_llama_cpp_reads(fields: dict[str, Any], rope: RopeConfig) -> None:
    assert read(**fields).rope == rope


@pytest.mark.parametrize("key", ["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"])
def test_an_attention_factor_of_yarn_comes_on_top(key: str) -> None:
    rope = read(**YARN, **{key: 0.5}).rope
    assert rope.scale == pytest.approx(0.5 * SERVED_YARN.scale)


REFUSED: dict[str, list[Any]] = {
    "rope.dimension_count": [8],
    "attention.key_length": [32],
    "attention.value_length": [32],
    "vocab_size": [128],
    "attention.sliding_window": [1024],
    "attention.causal": [False],
    "attention.scale": [0.5],
    "attention.clamp_kqv": [8.0],
    "attention.max_alibi_bias": [8.0],
    "attention.temperature_scale": [0.1],
    "attention.output_scale": [0.5],
    "attn_logit_softcapping": [50.0],
    "final_logit_softcapping": [30.0],
    "logit_scale": [0.0625],
    "residual_scale": [0.22],
    "embedding_scale": [12.0],
    "expert_count": [8],
    "expert_used_count": [2],
    "expert_weights_norm": [True],
    "interleave_moe_layer_step": [2],
    "use_parallel_residual": [True],
    "pooling_type": [1],
    "rope.dimension_sections": [[8, 4, 4, 0]],
    "rope.scaling.alpha": [1000.0],
    "rope.scaling.attn_factor": [0.5],
    "rope.scaling.yarn_ext_factor": [0.5],
    "rope.scaling.yarn_log_multiplier": [0.1],
}
HARMLESS: dict[str, list[Any]] = {
    "rope.dimension_count": [16],
    "attention.key_length": [16],
    "attention.value_length": [16],
    "vocab_size": [100],
    "attention.sliding_window": [2048],
    "attention.causal": [True],
    "attention.scale": [0.25],
    "attention.head_count_kv": [4],
    "logit_scale": [0.0, 1.0],
    "expert_count": [0],
    "tensor_data_layout": ["Meta AI original pth"],
}


def each(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(key, value, id=f"{key}={value}")
        for key, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("key", "value"), each(REFUSED))
def test_a_field_that_changes_results_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"^llama.{key} is .*: only .* can be served"):
        read(**{key: value})


@pytest.mark.parametrize(("key", "value"), each(HARMLESS))
def test_a_field_at_a_harmless_value_is_served(key: str, value: Any) -> None:
    assert read(**{key: value}) == read()


@pytest.mark.parametrize("key", HEADER)
def test_a_field_that_every_file_has_is_missed_by_name(key: str) -> None:
    rest = {name: value for name, value in HEADER.items() if name != key}
    with pytest.raises(CheckpointError, match=f"^1 missing field: llama.{key}$"):
        require_sizes(rest)


def test_a_number_of_heads_by_layer_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"num_key_value_heads is \[4, 2\]"):
        read(**{"attention.head_count_kv": [4, 2]})


def test_fields_that_nothing_reads_are_found_by_name() -> None:
    fields = {**HEADER, **YARN, "expert_count": 0, "wobble": 1, "rope.spiral": 2.0}
    assert unknown_fields(fields) == ["llama.rope.spiral", "llama.wobble"]


def test_a_warning_names_fields_that_nothing_reads(write_gguf: Write) -> None:
    path = write_gguf(random_llama(PRESETS["tiny"]), fields={"wobble": 1})
    message = "model.gguf: nothing here reads llama.wobble: .* compare some with those of llama.cpp"
    with pytest.warns(CheckpointWarning, match=message):
        load_llama(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"fields": {"attention.sliding_window": 512}},
            "model.gguf: llama.attention.sliding_window is 512: only null or at least the context",
            id="window",
        ),
        pytest.param(
            {"fields": {"attention.key_length": 32}},
            "llama.attention.key_length is 32: only the length of a head",
            id="partial-rotation",
        ),
        pytest.param(
            {"left_out": ["block_count", "context_length"]},
            "2 missing fields: llama.block_count, llama.context_length",
            id="missing-fields",
        ),
    ],
)
def test_a_file_is_refused_before_it_is_de_quantised(
    changes: dict[str, Any], message: str, write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", None)
    path = write_gguf(random_llama(PRESETS["tiny"]), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_llama(path)


SCALED: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "factor-without-a-type": (
        {"rope.scaling.factor": 4.0},
        RopeConfig(rope_type="linear", factor=4.0),
    ),
    "old-key": ({"rope.scale_linear": 4.0}, RopeConfig(rope_type="linear", factor=4.0)),
    "yarn-attention-factor": (
        {**YARN, "rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 0.5},
        RopeConfig(
            rope_type="yarn",
            factor=8.0,
            original_max_positions=256,
            attention_factor=0.5 * SERVED_YARN.scale,
        ),
    ),
}


@pytest.mark.parametrize(("fields", "rope"), SCALED.values(), ids=SCALED)
def test_a_scaled_rope_has_the_logits_of_transformers(
    fields: dict[str, Any],
    rope: RopeConfig,
    ids: Tensor,
    logits: Any,
    hf_logits: Any,
    error_of: Any,
    write_gguf: Write,
) -> None:
    plain = random_llama(PRESETS["tiny"])
    scaled = random_llama(replace(PRESETS["tiny"], rope=rope))
    expected = hf_logits(scaled, ids)
    loaded = load_llama(write_gguf(plain, fields=fields))
    assert error_of(logits(loaded, ids), expected) <= 1e-4
    assert error_of(logits(plain, ids), expected) > 1e-2


def part(path: Path, number: int) -> Path:
    return path.with_name(f"model-{number:05}-of-00003.gguf")


@pytest.fixture
def split(write_gguf: Write) -> Path:
    """Return part 1 of a file that is split in three."""
    return write_gguf(random_llama(PRESETS["tiny"]), tensors_per_part=15)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_of_a_split_file_is_refused_with_the_command_that_merges(
    number: int, split: Path
) -> None:
    message = (
        rf"is part {number} of 3 of a split GGUF file \(all are here\): merge them with "
        "'llama-gguf-split --merge model-00001-of-00003.gguf model.gguf', and load model.gguf"
    )
    with pytest.raises(CheckpointError, match=message):
        load_llama(part(split, number))


def test_missing_parts_are_named(split: Path) -> None:
    part(split, 2).unlink()
    message = r"\(missing here: model-00002-of-00003.gguf\)"
    with pytest.raises(CheckpointError, match=message):
        load_llama(split)


def test_a_part_under_another_name_is_known_by_its_header(split: Path) -> None:
    renamed = split.rename(split.with_name("mine.gguf"))
    with pytest.raises(CheckpointError, match=r"mine.gguf: is part 1 of 3 .*missing here: "):
        load_llama(renamed)


def test_transformers_makes_up_the_tensors_of_the_other_parts(split: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _, found = transformers.LlamaForCausalLM.from_pretrained(
        split.parent, gguf_file=split.name, dtype=torch.float32, output_loading_info=True
    )
    assert len(found["missing_keys"]) > 20
