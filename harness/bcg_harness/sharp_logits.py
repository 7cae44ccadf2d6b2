"""Attention on logits as large as trained models have: those of random weights are near 0, where much goes unseen."""

from dataclasses import replace

from bcg_core import AttentionBackend, PrefillBatch
from bcg_harness.budgets import Errors, Measured
from bcg_harness.layer_trial import LayerTrial
from bcg_harness.stage import Stage

LARGEST_LOGIT = 100.0
"""Above 88, beyond which ``exp`` overflows in float32, and far beyond masks that are finite but small."""


def measure_sharp(
    stage: Stage, batch: PrefillBatch, backend: AttentionBackend
) -> tuple[Measured, ...]:
    """Measure one layer of ``batch``, whose keys are in the cache, with queries that make the largest logit 100.

    ``exp`` makes the error of a logit one of its weight. On few rows the low-precision computation may be right by
    luck, so the largest error of any logit is added to its own: there are many more of these.
    """
    trial = LayerTrial(batch, stage.model.spec, scale=stage.spec.scale, largest_logit=LARGEST_LOGIT)
    measured, more = trial.measure(trial.run(backend)), trial.logit_error()
    return tuple(
        replace(
            one,
            low=Errors(whole=one.low.whole + more, row=one.low.row + more),
            what=f"logits up to {LARGEST_LOGIT:.0f}, {one.what}",
        )
        for one in measured
    )
