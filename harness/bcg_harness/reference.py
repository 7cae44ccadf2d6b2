"""An independent Llama in plain PyTorch, to judge the captured one by.

Shape letters: B requests of equal length, S tokens of each, R some of them, D model dim, N query heads, K KV heads,
H head dim, F rotated pairs of a head, X any.

It shares with the library the weights and the RoPE table, which belong to the checkpoint, and nothing else: no cache,
no pages, no graphs, no fused projections, no attention kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from bcg_llama import LlamaModel
from bcg_llama.rope_table import cos_sin_table

_MAX_LOGITS = 2**27
"""Attention logits of one layer that are held at a time."""

_ROWS = 256
"""Tokens whose attention is computed at a time."""


def high_precision(dtype: torch.dtype) -> torch.dtype:
    """Return the type that results in ``dtype`` are judged by: float64 for float32, float32 for 16-bit types."""
    return torch.float64 if dtype == torch.float32 else torch.float32


class LlamaReference:
    """Compute hidden states of whole requests from the weights of ``model``, in any floating-point type."""

    def __init__(self, model: LlamaModel) -> None:
        self.config = model.config
        self.device = model.spec.device
        self._weights = dict(model.named_tensors())
        self._table = cos_sin_table(
            self.config.rope,
            head_dim=self.config.head_dim,
            max_positions=self.config.max_positions,
            device=self.device,
        )

    @torch.inference_mode()
    def hidden(self, token_ids: list[list[int]], dtype: torch.dtype) -> Tensor:
        """Return the normalised hidden states ``[B, S, D]`` of requests of equal length, each from its first token.

        In float32 and float64 every operation runs in ``dtype``. In a 16-bit type it is what Llamas do there: products,
        norms, rotations and softmax are computed in float32, and what one of them hands to the next is rounded.
        """
        ids_BS = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        each = max(1, _MAX_LOGITS // (self.config.num_heads * ids_BS.shape[1] ** 2))
        return torch.cat([self._forward(part_BS, dtype) for part_BS in ids_BS.split(each)])

    def _forward(self, ids_BS: Tensor, dtype: torch.dtype) -> Tensor:
        x_BSD = self._weights["model.embed_tokens.weight"][ids_BS].to(dtype)
        for number in range(self.config.num_layers):
            layer = f"model.layers.{number}."
            x_BSD = x_BSD + self._attention(layer, self._norm(layer + "input_layernorm", x_BSD))
            x_BSD = x_BSD + self._mlp(layer, self._norm(layer + "post_attention_layernorm", x_BSD))
        return self._norm("model.norm", x_BSD)

    def _attention(self, layer: str, x_BSD: Tensor) -> Tensor:
        config, length = self.config, x_BSD.shape[1]
        q_BNSH = self._rotate(self._heads(layer + "self_attn.q_proj", x_BSD))
        k_BKSH = self._rotate(self._heads(layer + "self_attn.k_proj", x_BSD))
        v_BKSH = self._heads(layer + "self_attn.v_proj", x_BSD)
        group = config.num_heads // config.num_kv_heads
        k_BNSH, v_BNSH = (kv.repeat_interleave(group, dim=1) for kv in (k_BKSH, v_BKSH))
        # In parts, as nobody sees what comes later: half the work, and little memory.
        starts = range(0, length, _ROWS)
        parts = [
            self._attend(q_BNSH, k_BNSH, v_BNSH, slice(i, min(i + _ROWS, length))) for i in starts
        ]
        out_BNSH = torch.cat(parts, dim=2)
        out_BSX = out_BNSH.transpose(1, 2).flatten(2)
        return self._linear(layer + "self_attn.o_proj", out_BSX)

    def _attend(self, q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, rows: slice) -> Tensor:
        """Attend with some rows, ``[B, N, R, H]``."""
        wide, stop = _wide(q_BNSH.dtype), rows.stop
        q_BNRH, k_BNSH, v_BNSH = q_BNSH[:, :, rows], k_BNSH[:, :, :stop], v_BNSH[:, :, :stop]
        logits_BNRS = q_BNRH.to(wide) @ k_BNSH.to(wide).mT * self.config.head_dim**-0.5
        shape = stop - rows.start, stop
        seen_RS = torch.ones(shape, dtype=torch.bool, device=self.device).tril(rows.start)
        weights_BNRS = logits_BNRS.masked_fill(~seen_RS, float("-inf")).softmax(dim=-1)
        return _product(weights_BNRS.to(q_BNSH.dtype), v_BNSH)

    def _mlp(self, layer: str, x_BSD: Tensor) -> Tensor:
        gate, up = (self._linear(f"{layer}mlp.{name}_proj", x_BSD) for name in ("gate", "up"))
        return self._linear(layer + "mlp.down_proj", F.silu(gate) * up)

    def _heads(self, name: str, x_BSD: Tensor) -> Tensor:
        x_BSX = self._linear(name, x_BSD)
        return x_BSX.view(*x_BSX.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def _rotate(self, x_BNSH: Tensor) -> Tensor:
        wide = _wide(x_BNSH.dtype)
        cos_SF, sin_SF = (table[: x_BNSH.shape[2]].to(wide) for table in self._table)
        first, second = x_BNSH.to(wide).chunk(2, dim=-1)
        rotated = [first * cos_SF - second * sin_SF, second * cos_SF + first * sin_SF]
        return torch.cat(rotated, dim=-1).to(x_BNSH.dtype)

    def _norm(self, name: str, x_BSD: Tensor) -> Tensor:
        wide_BSD = x_BSD.to(_wide(x_BSD.dtype))
        mean_square = wide_BSD.pow(2).mean(-1, keepdim=True)
        normal_BSD = wide_BSD * torch.rsqrt(mean_square + self.config.rms_norm_eps)
        return normal_BSD.to(x_BSD.dtype) * self._weights[name + ".weight"].to(x_BSD.dtype)

    def _linear(self, name: str, x_BSX: Tensor) -> Tensor:
        bias = self._weights.get(name + ".bias")
        out_BSX = _product(x_BSX, self._weights[name + ".weight"].mT)
        return out_BSX if bias is None else out_BSX + bias.to(x_BSX.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type that products and sums are accumulated in: at least float32, as float16 squares overflow."""
    return torch.promote_types(dtype, torch.float32)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, and round once to the type of ``a``."""
    wide = _wide(a.dtype)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)
