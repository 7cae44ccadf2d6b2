"""Runners whose replays give something else than padded eager does, each in one place alone.

Shape letters: R real tokens, D model dim, B requests, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch

from bcg_core import PrefillBatch, PrefillResult, PrefillRunner


class _Spoils(PrefillRunner):
    """Let ``spoil`` change the result of a replay, and of nothing else."""

    def prefill(self, batch: PrefillBatch, **kwargs: Any) -> PrefillResult:
        """Prefill, and spoil what was replayed."""
        result = super().prefill(batch, **kwargs)
        if result.admission.bucket is None:
            return result
        with torch.inference_mode():
            return self.spoil(batch, result)

    def spoil(self, batch: PrefillBatch, result: PrefillResult) -> PrefillResult:
        """Return what the caller is given."""
        raise NotImplementedError

    def round_up(self, result: PrefillResult) -> PrefillResult:
        """Return the hidden states with another rounding of the first token, which no logits depend on."""
        factor_R = torch.ones_like(result.hidden_RD[:, :1])
        factor_R[0] += torch.finfo(factor_R.dtype).eps
        return replace(result, hidden_RD=result.hidden_RD * factor_R)


class SpoilsHidden(_Spoils):
    """Round hidden states otherwise at replay."""

    def spoil(self, batch: PrefillBatch, result: PrefillResult) -> PrefillResult:
        """Change the first token's."""
        return self.round_up(result)


class SpoilsFirstReplay(_Spoils):
    """Round hidden states otherwise when a batch is replayed for the first time."""

    _seen: PrefillBatch | None = None

    def spoil(self, batch: PrefillBatch, result: PrefillResult) -> PrefillResult:
        """Change the first token's, once a batch."""
        first, self._seen = batch is not self._seen, batch
        return self.round_up(result) if first else result


class SpoilsLogits(_Spoils):
    """Round logits otherwise at replay."""

    def spoil(self, batch: PrefillBatch, result: PrefillResult) -> PrefillResult:
        """Change them all."""
        up = 1 + torch.finfo(result.logits_BV.dtype).eps
        return replace(result, logits_BV=result.logits_BV * up)


class SpoilsCache(_Spoils):
    """Round the keys that a replay has left in the batch's own slots."""

    def spoil(self, batch: PrefillBatch, result: PrefillResult) -> PrefillResult:
        """Change those of the last layer, when nobody reads them any more."""
        keys, _ = self.kv_cache.flat(self.model.spec.num_layers - 1)
        slots_R = batch.slot_mapping_R.to(keys.device)
        keys[slots_R] *= 1 + torch.finfo(keys.dtype).eps
        return result
