"""What a user would run instead: transformers' ``LlamaForCausalLM``, with the fastest attention it has here.

Shape letters: B requests, S new tokens of the longest request, D model dim.
"""

from dataclasses import replace
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from bcg_core import AttentionBackend, PrefillBatch
from bcg_harness.bench.cell import NO_BACKEND
from bcg_harness.bench.mode import ExecutionMode, Ground, Prefilled
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.bench.timing import synchronise
from bcg_harness.bench.transformers_batch import TransformersBatch, cached_prefixes
from bcg_harness.bench.transformers_model import TransformersLlama
from bcg_harness.errors import HarnessError
from bcg_harness.outcome import describe

# Not flex_attention, which compiles a kernel for each new shape, and not transformers' own "eager".
IMPLEMENTATIONS = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention of transformers that is tried; the first needs nothing but torch, and the others are compared with it."""

_WRONG = 0.1
"""Relative L2 error of logits that no rounding explains; the run's own check is far closer."""

_REPEATS = 5


class TransformersEager(ExecutionMode):
    """Run batches in transformers, with keys and values in its own ``DynamicCache``.

    Batches are padded; flash attention gets those without prefixes packed. ``prefill`` neither reads nor writes the
    paged cache: ``stage`` copies prefixes from there beforehand. Logits are computed for the last token of each request
    alone.
    """

    name = "transformers_eager"
    summary = "the same weights in transformers' LlamaForCausalLM, with its fastest attention"
    own_attention = True

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._llama: TransformersLlama | None = None
        self._notes: list[str] = []
        self._staged: dict[PrefillBatch, Any] = {}

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Ask for transformers."""
        if find_spec("transformers") is None:
            return "transformers is not installed: pip install 'breakable-cuda-graph[hf]'"
        return None

    def prepare(self, backend: AttentionBackend, label: str) -> ModeSetup:
        """Share the weights, try each attention on a batch of four requests, and take the fastest right one."""
        if self._llama is not None:
            return ModeSetup(backend=NO_BACKEND, mode=self.name)
        begun = perf_counter()
        self._llama = TransformersLlama(self.ground.plain)
        self._choose(self._trial_batch())
        return ModeSetup(backend=NO_BACKEND, mode=self.name, warm_up_seconds=perf_counter() - begun)

    def notes(self) -> list[str]:
        """Say which attention was taken, and what became of the others."""
        return list(self._notes)

    def refuses(self, batch: PrefillBatch) -> str | None:
        """Refuse a batch without requests."""
        return None if batch.num_requests else "transformers needs at least one request"

    def stage(self, batch: PrefillBatch) -> None:
        """Copy the prefixes of ``batch`` from the paged cache into a ``DynamicCache``, which a prefill uses up."""
        cache = self._model.new_cache()
        for layer, (keys, values) in enumerate(cached_prefixes(batch, self.ground.kv_cache)):
            cache.update(keys, values, layer)
        self._staged[batch] = cache

    @torch.inference_mode()
    def prefill(self, batch: PrefillBatch) -> Prefilled:
        """Run ``batch``, which must have been staged when it has a prefix."""
        cache = self._staged.pop(batch, None)
        if cache is None:
            assert not any(batch.prefix_lens), "stage() the batch first: it has a prefix"
            cache = self._model.new_cache()
        packs = self._model.implementation.startswith("flash") and batch.num_requests > 1
        if packs and not any(batch.prefix_lens):
            inputs = TransformersBatch.packed(batch)
        else:
            inputs = TransformersBatch.padded(batch)
        hidden_BSD = self._model.hidden(inputs.input_ids_BS, cache, **inputs.further)
        last_BD = hidden_BSD.flatten(0, 1).index_select(0, inputs.last_B)
        logits_BV = self._model.logits(last_BD)
        for sequence, length in zip(batch.sequences, batch.kv_lens, strict=False):
            self.ground.kv_cache.mark_written(sequence, length)
        return Prefilled(
            logits_BV=logits_BV,
            next_tokens_B=logits_BV.argmax(dim=-1),
            hidden_RD=None,
            padded_tokens=inputs.input_ids_BS.numel(),
            served_by=f"transformers, {self._model.implementation}",
        )

    @property
    def _model(self) -> TransformersLlama:
        assert self._llama is not None, "prepare() comes first"
        return self._llama

    def _trial_batch(self) -> PrefillBatch:
        """Return four requests of random tokens that fill the largest bucket at most, the last about half the first."""
        spec = self.ground.plain.spec
        longest = min(self.ground.buckets[-1] // 4, spec.max_positions)
        lengths = [max(1, longest - longest * number // 8) for number in range(4)]
        generator = torch.Generator().manual_seed(0)
        ids_R = torch.randint(0, spec.vocab_size, (sum(lengths),), generator=generator)
        return replace(PrefillBatch.scratch(lengths, self.ground.kv_cache), input_ids_R=ids_R)

    def _choose(self, batch: PrefillBatch) -> None:
        """Switch to the fastest attention that transformers has for ``batch``."""
        expected_BV = None
        seconds: dict[str, float] = {}
        for name in IMPLEMENTATIONS:
            try:
                self._model.use(name)
                logits_BV = self.prefill(batch).logits_BV.float()
            except ImportError:
                self._notes.append(f"{name}: its library is not installed")
                continue
            except Exception as error:  # noqa: BLE001  # transformers', the library's, whatever it is
                self._notes.append(f"{name}: not usable here: {describe(error)}")
                continue
            expected_BV = logits_BV if expected_BV is None else expected_BV
            off = float((logits_BV - expected_BV).norm() / expected_BV.norm())
            if not off <= _WRONG:
                self._notes.append(f"{name}: wrong, logits are off by {off:.1e}")
                continue
            seconds[name] = self._time(batch)
        if not seconds:
            raise HarnessError(f"transformers has no attention that works here: {self._notes}")
        fastest = min(seconds, key=lambda name: seconds[name])
        self._model.use(fastest)
        times = ", ".join(f"{name} {1e3 * taken:.2f} ms" for name, taken in seconds.items())
        self._notes.insert(0, f"attention: {fastest} (tried: {times})")

    def _time(self, batch: PrefillBatch) -> float:
        """Return the shortest of a few prefills."""
        taken = []
        for _ in range(_REPEATS):
            synchronise(self.ground.device)
            begun = perf_counter()
            self.prefill(batch)
            synchronise(self.ground.device)
            taken.append(perf_counter() - begun)
        return min(taken)
