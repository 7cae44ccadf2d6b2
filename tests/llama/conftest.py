"""Run a Llama without a runner, and build the same model in transformers."""

import json
from collections.abc import Callable, Mapping
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
