"""Llama 2/3 for breakable prefill graphs: configuration, model, checkpoints and random weights."""

from bcg_llama.checkpoint import CheckpointWarning
from bcg_llama.config import LlamaConfig
from bcg_llama.load import load_llama, load_tokenizer
from bcg_llama.model import LlamaModel
from bcg_llama.ops import ElementwiseOps
from bcg_llama.presets import PRESETS
from bcg_llama.random_init import random_llama
from bcg_llama.rope import RopeConfig
from bcg_llama.weights import LlamaWeights

__all__ = [
    "PRESETS",
    "CheckpointWarning",
    "ElementwiseOps",
    "LlamaConfig",
    "LlamaModel",
    "LlamaWeights",
    "RopeConfig",
    "load_llama",
    "load_tokenizer",
    "random_llama",
]
