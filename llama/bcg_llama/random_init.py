"""Llamas with random weights, for tests and benchmarks that need no checkpoint."""

import math

import torch

from bcg_core.ambient import neutrally
from bcg_llama.config import LlamaConfig
from bcg_llama.model import LlamaModel
from bcg_llama.weights import LlamaWeights


@neutrally("random_llama")
def random_llama(
    config: LlamaConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    fuse: bool | None = None,
) -> LlamaModel:
    """Make a Llama with random weights, drawn on ``device``.

    Equal arguments give equal weights on the same kind of device. Every projection keeps the size of its input, so
    activations stay near 1 at any depth; norm weights and biases are noisy, so that a mistake with them shows.

    Args:
        config: the shapes; ``PRESETS`` has some.
        dtype: of weights and activations.
        device: where they live.
        seed: of the random numbers.
        fuse: compile the element-wise functions; None does so on CUDA only.
    """
    device = torch.device(device)
    weights = LlamaWeights.empty(config, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in weights.named_tensors():
        if name.endswith("norm.weight"):
            tensor.normal_(1.0, 0.1, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.1, generator=generator)
        else:
            # Queries and keys a little larger than the rest: softmax weighs a few tokens of many, as in a trained
            # model, so that attention over the wrong tokens shows.
            gain = math.sqrt(2) if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            tensor.normal_(0.0, gain / math.sqrt(tensor.shape[1]), generator=generator)
    return LlamaModel(weights, fuse=fuse)
