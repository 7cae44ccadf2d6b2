"""Whether metadata stays what it is while other batches are prepared.

Shape letters: R new tokens, N query heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from bcg_core import AttentionBackend, Chunk, KVSequence, PrefillBatch
from bcg_core.errors import PASSED_ON
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
        result_RNH: what it computed; None when something was raised, here or in making or running the others.
        error: what was raised, in words.
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
    stage: Stage,
    batch: PrefillBatch,
    backend: AttentionBackend,
    twin: Callable[[], AttentionBackend],
) -> Interleaving:
    """Attend to one layer of ``batch``, whose keys are in the cache, with nothing and with others in between.

    The backend prepares one batch in between: two are in flight at once, which is what metadata has to survive.
    What ``twin`` returns prepares two, as nothing that another instance does may matter.

    The cache is left with the other batch in it, in pages that are free again: the caller restores it.
    """
    trial = LayerTrial(batch, stage.model.spec, scale=stage.spec.scale)
    alone_RNH = trial.run(backend)
    sequence = KVSequence()
    chunk = Chunk(token_ids=[0] * _OTHER_TOKENS, sequence=sequence)
    other = PrefillBatch.from_chunks([chunk], batch.kv_cache)
    # Nobody wrote these slots. In a server nobody attends to NaN of their own, and partial results that it left in a
    # workspace would be held against a backend that rightly multiplies them by 0.
    slots = other.slot_mapping_R.to(batch.device)
    batch.kv_cache.storage_L2PSKH.flatten(2, 3)[:, :, slots] = 1
    try:
        between = LayerTrial(other, stage.model.spec, scale=stage.spec.scale)

        def beside(by: str, make_others: Callable[[], Sequence[AttentionBackend]]) -> Disturbed:
            try:
                others = make_others()
                metadata = backend.init_forward_metadata(batch)
                for each in others:
                    between.run(each)
                result_RNH = trial.attend(backend, metadata)
            except PASSED_ON:
                raise
            except BaseException as error:  # noqa: BLE001  # the plug-in's; other checks go on
                return Disturbed(by=by, result_RNH=None, error=describe(error))
            measured = () if backend.capabilities.deterministic else trial.measure(result_RNH)
            return Disturbed(by=by, result_RNH=result_RNH, measured=tuple(measured))

        return Interleaving(
            alone_RNH=alone_RNH,
            own=beside("another batch of this instance", lambda: [backend]),
            twin=beside("batches of another instance", lambda: [twin()] * 2),
        )
    finally:
        batch.kv_cache.free(sequence)
