"""Model shapes by name: tiny ones for tests, real ones for benchmarks with random weights."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from bcg_llama.config import LlamaConfig
from bcg_llama.rope import RopeConfig

_LLAMA3_ROPE = RopeConfig(
    rope_type="llama3",
    theta=500000.0,
    factor=8.0,
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)

_TINY = LlamaConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_positions=2048,
)

PRESETS: Mapping[str, LlamaConfig] = MappingProxyType(
    {
        # Small enough for a CPU; all differ from "tiny" in what their name says.
        "tiny": _TINY,
        "tiny-mha": replace(_TINY, num_heads=4, num_kv_heads=4),
        "tiny-mqa": replace(_TINY, num_heads=4, num_kv_heads=1),
        "tiny-h128": replace(_TINY, num_heads=4, head_dim=128),
        "tiny-odd": replace(_TINY, vocab_size=1009, hidden_size=144, num_heads=9, num_kv_heads=3),
        "tiny-tied": replace(_TINY, tie_word_embeddings=True),
        "tiny-bias": replace(_TINY, attention_bias=True, mlp_bias=True),
        "tiny-linear": replace(_TINY, rope=RopeConfig(rope_type="linear", factor=4.0)),
        "tiny-llama3": replace(_TINY, rope=replace(_LLAMA3_ROPE, original_max_positions=256)),
        "tiny-yarn": replace(
            _TINY, rope=RopeConfig(rope_type="yarn", factor=8.0, original_max_positions=256)
        ),
        # The shapes of SmolLM2-135M, Llama 3.2 1B and Llama 3.1 8B.
        "smollm2-135m": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            rope=RopeConfig(theta=100000.0),
            max_positions=8192,
            tie_word_embeddings=True,
        ),
        "llama-1b": LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            rope=replace(_LLAMA3_ROPE, factor=32.0),
            max_positions=131072,
            tie_word_embeddings=True,
        ),
        "llama-8b": LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            rope=_LLAMA3_ROPE,
            max_positions=131072,
        ),
    }
)
"""Configurations by name; see ``random_llama``."""
