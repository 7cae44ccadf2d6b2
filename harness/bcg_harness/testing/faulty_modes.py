"""Execution modes with one fault each, to prove that no wrong result gets a time."""

from dataclasses import replace

from bcg_core import PrefillBatch
from bcg_harness.bench.mode import Ground, Prefilled
from bcg_harness.bench.runner_modes import Breakable, Eager


class ScalesLogits(Breakable):
    """Return logits that are 5 % too large; the sampled tokens stay right."""

    name = "scales_logits"

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run, and scale."""
        result = super().prefill(batch)
        return replace(result, logits_BV=result.logits_BV * 1.05)


class ShiftsHidden(Breakable):
    """Return hidden states of the neighbouring rows; logits and tokens stay right."""

    name = "shifts_hidden"

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run, and shift."""
        result = super().prefill(batch)
        assert result.hidden_RD is not None
        return replace(result, hidden_RD=result.hidden_RD.roll(1, dims=0))


class SpoilsCache(Eager):
    """Spoil the cached keys and values of the first new token: only what reads them later can tell."""

    name = "spoils_cache"

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run, and overwrite."""
        result = super().prefill(batch)
        slot = int(batch.slot_mapping_R[0])
        for layer in range(self.ground.model.spec.num_layers):
            for rows in self.ground.kv_cache.flat(layer):
                rows[slot] = 100.0
        return result


class RaisesInPrefill(Eager):
    """Fail in every prefill."""

    name = "raises_in_prefill"

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Raise."""
        raise RuntimeError("out of luck")


class RaisesWhenTimed(Eager):
    """Fail in the fourth prefill: behind the check and the warm-up, in the second round of a workload of one batch."""

    name = "raises_when_timed"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._left = 3

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run, or raise."""
        if not self._left:
            raise RuntimeError("out of luck")
        self._left -= 1
        return super().prefill(batch)


class RefusesPrefixes(Eager):
    """Refuse batches with cached tokens."""

    name = "refuses_prefixes"

    def refuses(self, batch: PrefillBatch) -> str | None:
        """Look at the prefixes."""
        return "no cached prefixes" if any(batch.prefix_lens) else None


class TurnsWrong(Breakable):
    """Return right results in the first two passes, and logits that are 5 % too large in all later ones."""

    name = "turns_wrong"

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._calls = 0

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run, and scale from the third time on."""
        self._calls += 1
        result = super().prefill(batch)
        return result if self._calls <= 2 else replace(result, logits_BV=result.logits_BV * 1.05)


class EndsTheProcess(Eager):
    """Try to end the process in every prefill."""

    name = "ends_the_process"

    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Leave."""
        raise SystemExit(7)
