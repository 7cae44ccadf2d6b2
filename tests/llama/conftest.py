"""Run a Llama without a runner, and build the same model in transformers."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bcg_core.boundary import BoundaryBuffers
from bcg_core.context import ForwardContext, Phase
from bcg_core.kv_cache import PagedKVCache
from bcg_llama import LlamaConfig, LlamaModel

Logits = Callable[..., Tensor]


class OneSequence:
    """Attend over one sequence without a prefix, straight from this forward's keys and values."""

    name = "one-sequence"
    capabilities = SimpleNamespace(supports_out=False)

    def __init__(self) -> None:
        self.layers: list[int] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Any, layer: int, metadata: Any, out: Any
    ) -> Tensor:
        self.layers.append(layer)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended[0].transpose(0, 1)


@pytest.fixture(scope="session")
def make_context() -> Callable[..., ForwardContext]:
    """Make a context of ``padded`` rows for one sequence of ``real`` tokens."""

    def make(model: LlamaModel, padded: int, real: int | None = None) -> ForwardContext:
        device = model.spec.device
        cache = PagedKVCache(model.spec, num_pages=2 + padded // 16 + 1, page_size=16)
        ctx = ForwardContext(cache)
        slots = torch.arange(16, 16 + padded, device=device)
        ctx.begin(Phase.EAGER, BoundaryBuffers(model.spec, padded), padded, slots)
        batch: Any = SimpleNamespace(num_tokens=real or padded)
        backend: Any = OneSequence()
        ctx.bind(batch, backend, None)
        return ctx

    return make


@pytest.fixture(scope="session")
def logits(make_context: Callable[..., ForwardContext]) -> Logits:
    """Compute the logits of every position of one sequence."""

    def compute(model: LlamaModel, ids: Tensor) -> Tensor:
        positions = torch.arange(len(ids), device=ids.device)
        ctx = make_context(model, len(ids))
        return model.compute_logits(model.forward(ids, positions, ctx)).float()

    return compute


@pytest.fixture(scope="session")
def ids() -> Tensor:
    """Token ids below 1000 of one sequence, longer than any tiny model's original context."""
    return torch.randint(0, 1000, (300,), generator=torch.Generator().manual_seed(1))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="session")
def error_of() -> Callable[[Tensor, Tensor], float]:
    """Return the relative L2 distance of two tensors."""
    return relative_error


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    rope = asdict(config.rope)
    names = {"theta": "rope_theta", "original_max_positions": "original_max_position_embeddings"}
    scaled = ["theta", "factor", "original_max_positions"]
    yarn = ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"]
    used = {
        "default": ["theta"],
        "linear": ["theta", "factor"],
        "llama3": [*scaled, "low_freq_factor", "high_freq_factor"],
        "yarn": [*scaled, *yarn],
    }[config.rope.rope_type]
    parameters = {names.get(name, name): rope[name] for name in used if rope[name] is not None}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": {"rope_type": config.rope.rope_type, **parameters},
    }


@pytest.fixture(scope="session")
def hf_dict() -> Callable[[LlamaConfig], dict[str, Any]]:
    """Write a configuration as transformers 5 does."""
    return to_hf


@pytest.fixture(scope="session")
def hf_logits() -> Logits:
    """Compute the logits of every position in transformers, with the weights of one of our models."""
    transformers = pytest.importorskip("transformers")

    def compute(model: LlamaModel, ids: Tensor) -> Tensor:
        config = transformers.LlamaConfig(**to_hf(model.config))
        reference = transformers.LlamaForCausalLM(config).to(model.spec.dtype).eval()
        tied = model.config.tie_word_embeddings
        outcome = reference.load_state_dict(dict(model.named_tensors()), strict=not tied)
        assert set(outcome.missing_keys) <= {"lm_head.weight"}
        with torch.no_grad():
            computed: Tensor = reference(ids[None]).logits[0].float()
        return computed

    return compute


Write = Callable[..., Path]


@pytest.fixture
def write_directory(tmp_path: Path) -> Write:
    """Write a model as a Hugging Face directory, with changes, and return its path."""

    def write(
        model: LlamaModel,
        *,
        shards: int = 1,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> Path:
        raw = {**to_hf(model.config), **(config or {})}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        named = {**dict(model.named_tensors()), **(tensors or {})}
        kept = {name: tensor.clone() for name, tensor in named.items() if tensor is not None}
        if shards == 1:
            save_file(kept, tmp_path / "model.safetensors")
            return tmp_path
        files = {name: f"model-{i % shards + 1:05}.safetensors" for i, name in enumerate(kept)}
        for file in set(files.values()):
            save_file({n: t for n, t in kept.items() if files[n] == file}, tmp_path / file)
        index = {"metadata": {}, "weight_map": files}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return write


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(model: LlamaModel) -> dict[str, Tensor]:
    """Rename to llama.cpp's names; its queries and keys hold the two elements of a rotated pair side by side."""
    renamed = {}
    for name, tensor in model.named_tensors():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.view(-1, 2, model.config.head_dim // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    return renamed


@pytest.fixture
def write_gguf(tmp_path: Path) -> Write:
    """Write a model as float32 GGUF, with changes, and return its path (of all parts, if it is split, the first's)."""
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

    def write(
        model: LlamaModel,
        *,
        architecture: str = "llama",
        tensors: dict[str, Tensor | None] | None = None,
        scaling: tuple[str, float] | None = None,
        fields: Mapping[str, Any] | None = None,
        left_out: Collection[str] = (),
        tensors_per_part: int = 0,
    ) -> Path:
        path, config = tmp_path / "model.gguf", model.config
        writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_positions)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_block_count(config.num_layers)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope.theta)
        if scaling is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType(scaling[0]))
            writer.add_rope_scaling_factor(scaling[1])
        if config.rope.original_max_positions is not None:
            writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_positions)
        for name, value in (fields or {}).items():
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
            getattr(writer, f"add_{kind[type(value)]}")(f"llama.{name}", value)
        for name in left_out:
            del writer.kv_data[0][f"llama.{name}"]
        for name, tensor in {**gguf_tensors(model), **(tensors or {})}.items():
            if tensor is not None:
                writer.add_tensor(name, tensor.numpy().copy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return min(tmp_path.glob("*.gguf"))

    return write
