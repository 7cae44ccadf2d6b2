"""The cosines and sines that rotate query and key heads.

Shape letters: S positions of the table, F = H / 2 rotated pairs of a head of H elements.

The formulas are those of Hugging Face transformers (``modeling_rope_utils.py``), which checkpoints are trained with.
"""

import math

import torch
from torch import Tensor

from bcg_llama.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the F angles a position advances by, float32 on the CPU."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inverse_F = 1.0 / (rope.theta**exponents_F)
    if rope.rope_type == "linear":
        inverse_F = inverse_F / rope.factor
    elif rope.rope_type == "llama3":
        inverse_F = _llama3(rope, inverse_F)
    elif rope.rope_type == "yarn":
        inverse_F = _yarn(rope, inverse_F, head_dim)
    if rope.divisors is not None:
        inverse_F = inverse_F / torch.tensor(rope.divisors, dtype=torch.float32, device="cpu")
    return inverse_F


def cos_sin_table(
    rope: RopeConfig, *, head_dim: int, max_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[S, F]``, float32 on ``device``.

    They are computed on the CPU, so that every device gets the same bits.
    """
    positions_S = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles_SF = positions_S[:, None] * inverse_frequencies(rope, head_dim)
    return (angles_SF.cos() * rope.scale).to(device), (angles_SF.sin() * rope.scale).to(device)


def _llama3(rope: RopeConfig, inverse_F: Tensor) -> Tensor:
    """Stretch long wavelengths by ``factor``, keep short ones, and blend in between."""
    assert rope.original_max_positions is not None
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength_F = 2 * math.pi / inverse_F
    blend_F = ((original / wavelength_F - low) / (high - low)).clamp(0, 1)
    return (1 - blend_F) * inverse_F / rope.factor + blend_F * inverse_F


def _yarn(rope: RopeConfig, inverse_F: Tensor, head_dim: int) -> Tensor:
    """Keep pairs that turn often over the original context, stretch those that hardly turn, ramp in between."""
    assert rope.original_max_positions is not None
    original = rope.original_max_positions

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    pairs_F = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    stretched_F = ((pairs_F - first) / width).clamp(0, 1)
    return inverse_F / rope.factor * stretched_F + inverse_F * (1 - stretched_F)
