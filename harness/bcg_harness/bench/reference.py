"""What every mode's result is held to: eager prefill with SDPA, itself held to an independent Llama.

Shape letters: R new tokens of a batch, B requests, S tokens of one sequence, D model dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bcg_core import (
    AttentionSpec,
    BackendRegistry,
    Chunk,
    KVSequence,
    Mode,
    PagedKVCache,
    PrefillBatch,
)
from bcg_harness.bench.arena import Scene
from bcg_harness.bench.mode import Ground, Prefilled
from bcg_harness.budgets import Comparison, Errors, RowErrors, compare, worst
from bcg_harness.errors import HarnessError
from bcg_harness.reference import LlamaReference, high_precision
from bcg_harness.tokens import TokenSource

BACKEND = "sdpa"
_SEQUENCE = 1024
_LOGIT_ROWS = 64


class Yardstick:
    """Know what rounding does to hidden states and logits of a model, from one sequence of up to 1024 tokens.

    Attributes:
        hidden_SD: what the sequence should come out as.
        token_ids: of the sequence.
    """

    def __init__(self, ground: Ground, source: TokenSource) -> None:
        model = ground.model
        self.token_ids = source.tokens(0, min(_SEQUENCE, model.spec.max_positions))
        reference, dtype = LlamaReference(model), model.spec.dtype
        low_SD = reference.hidden([self.token_ids], dtype)[0]
        self.hidden_SD = reference.hidden([self.token_ids], high_precision(dtype))[0]
        self._hidden = RowErrors.between(low_SD, self.hidden_SD)
        # The head is a product alone: in the model's own type, as every mode computes it.
        low_SV, high_SV = (
            model.compute_logits(rows[-_LOGIT_ROWS:].to(dtype)) for rows in (low_SD, self.hidden_SD)
        )
        self._logits = RowErrors.between(low_SV, high_SV).errors()

    def hidden_errors(self, rows: int) -> Errors:
        """Return the largest errors that rounding made on ``rows`` neighbouring rows, of at most the sequence's."""
        known = min(rows, len(self.token_ids))
        return Errors(whole=self._hidden.worst_stretch(known), row=self._hidden.worst_stretch(1))

    def logit_errors(self) -> Errors:
        """Return the largest errors that rounding made on the logits of one token."""
        return Errors(whole=self._logits.row, row=self._logits.row)


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """Hold what a timed step should come out as.

    Attributes:
        hidden_RD: hidden states of its new tokens.
        logits_BV: of each request's last token.
        new_lens: new tokens of each request.
    """

    hidden_RD: Tensor
    logits_BV: Tensor
    new_lens: tuple[int, ...]

    def compare(self, result: Prefilled, yardstick: Yardstick, step: int) -> Comparison:
        """Compare hidden states, where a mode keeps them, and logits; returns the worst, request by request."""
        comparisons = [
            compare(
                result.logits_BV,
                self.logits_BV,
                low=yardstick.logit_errors(),
                what=f"logits of step {step}",
            )
        ]
        if result.hidden_RD is not None:
            parts = zip(
                result.hidden_RD.split(self.new_lens),
                self.hidden_RD.split(self.new_lens),
                strict=True,
            )
            comparisons += [
                compare(
                    actual_RD,
                    expected_RD,
                    low=yardstick.hidden_errors(len(expected_RD)),
                    what=f"hidden states of step {step}, request {number}",
                )
                for number, (actual_RD, expected_RD) in enumerate(parts)
            ]
        return worst(comparisons)


class Reference:
    """Run workloads eagerly with SDPA. Raises HarnessError when that is wrong itself, as then nothing can be judged.

    Args:
        ground: what all modes share.
        source: gives the tokens of the sequence that the reference is checked on.

    Attributes:
        yardstick: what rounding does.
    """

    def __init__(self, ground: Ground, source: TokenSource) -> None:
        spec = AttentionSpec.of(ground.plain.spec, page_size=ground.kv_cache.page_size)
        self.yardstick = Yardstick(ground, source)
        self._runner = ground.new_runner(ground.plain)
        self._runner.use_backend(
            BackendRegistry().create(BACKEND, spec, self._runner.limits, ground.device)
        )
        self._check(ground.kv_cache)

    def _check(self, kv_cache: PagedKVCache) -> None:
        sequence = KVSequence()
        count = min(len(self.yardstick.token_ids), kv_cache.free_pages * kv_cache.page_size)
        chunk = Chunk(token_ids=self.yardstick.token_ids[:count], sequence=sequence)
        batch = PrefillBatch.from_chunks([chunk], kv_cache)
        result = self._runner.prefill(batch, mode=Mode.EAGER)
        found = compare(
            result.hidden_RD,
            self.yardstick.hidden_SD[:count],
            low=self.yardstick.hidden_errors(count),
            what="hidden states",
        )
        kv_cache.free(sequence)
        if not found.within:
            raise HarnessError(
                f"the reference, eager prefill with {BACKEND}, is wrong itself: error {found.error:.2e} exceeds "
                f"{found.budget:.2e}; run `bcg check --backend {BACKEND}` with this model to see where"
            )

    def run(self, scenes: Sequence[Scene]) -> list[Expected]:
        """Fill the cache with all steps, in order, and return what the timed ones should come out as."""
        return [
            expected for scene in scenes if (expected := self._run_scene(scene)) and scene.timed
        ]

    def _run_scene(self, scene: Scene) -> Expected:
        batch = scene.batch()
        result = self._runner.prefill(batch, mode=Mode.EAGER)
        return Expected(
            hidden_RD=result.hidden_RD.clone() if scene.timed else result.hidden_RD,
            logits_BV=result.logits_BV,
            new_lens=batch.new_lens,
        )


def spoil(scenes: Sequence[Scene], kv_cache: PagedKVCache) -> None:
    """Overwrite the cached keys and values of all timed tokens, so that a mode that does not write them is found."""
    for scene in scenes:
        if scene.timed:
            slots_R = scene.batch().slot_mapping_R.to(kv_cache.device)
            for layer in range(kv_cache.storage_L2PSKH.shape[0]):
                for rows in kv_cache.flat(layer):
                    rows.index_fill_(0, slots_R, 100.0)
