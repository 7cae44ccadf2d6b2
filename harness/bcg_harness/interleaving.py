"""Whether metadata stays what it is while other batches are prepared.

Shape letters: R new tokens, N query heads, H head dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from bcg_core import AttentionBackend, Chunk, KVSequence, PrefillBatch
from bcg_harness.budgets import Measured
from bcg_harness.layer_trial import LayerTrial
from bcg_harness.outcome import describe
from bcg_harness.stage import Stage

_OTHER_TOKENS = 3
"""Tokens of the other batch, which is one request: the spare pages of a stage hold it whatever their size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Disturbed:
    """Hold what a backend computed for a batch after others were prepared and attended to.

    Attributes:
        by: whose batches these were.
        result_RNH: what it computed; None when it raised.
        error: what it raised, in words.
        measured: errors of each request by definition, for a backend that is not deterministic.
    """

    by: str
    result_RNH: Tensor | None
    error: str = ""
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Interleaving:
    """Hold what a backend computed for a batch undisturbed, and with other batches in between.

    Attributes:
        alone_RNH: undisturbed.
        own: beside another batch of the same instance.
        twin: beside batches of a second instance.
    """

    alone_RNH: Tensor
    own: Disturbed
    twin: Disturbed


def interleave(
    stage: Stage, batch: PrefillBatch, backend: AttentionBackend, twin: AttentionBackend
) -> Interleaving:
    """Attend to one layer of ``batch``, whose keys are in the cache, with nothing and with others in between.

    The backend prepares one batch in between: two are in flight at once, which is what metadata has to survive.
    ``twin`` prepares two, as nothing that another instance does may matter.
    """
    trial = LayerTrial(batch, stage.model.spec, scale=stage.spec.scale)
    alone_RNH = trial.run(backend)
    sequence = KVSequence()
    chunk = Chunk(token_ids=[0] * _OTHER_TOKENS, sequence=sequence)
    other = PrefillBatch.from_chunks([chunk], batch.kv_cache)
    try:
        between = LayerTrial(other, stage.model.spec, scale=stage.spec.scale)

        def beside(by: str, others: Iterable[AttentionBackend]) -> Disturbed:
            metadata = backend.init_forward_metadata(batch)
            for each in others:
                between.run(each)
            try:
                result_RNH = trial.attend(backend, metadata)
            except Exception as error:  # noqa: BLE001  # the plan of another batch may not fit at all
                return Disturbed(by=by, result_RNH=None, error=describe(error))
            measured = () if backend.capabilities.deterministic else trial.measure(result_RNH)
            return Disturbed(by=by, result_RNH=result_RNH, measured=tuple(measured))

        return Interleaving(
            alone_RNH=alone_RNH,
            own=beside("another batch of this instance", [backend]),
            twin=beside("batches of another instance", [twin, twin]),
        )
    finally:
        batch.kv_cache.free(sequence)
