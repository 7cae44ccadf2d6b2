"""Take, for each shape of batch, the backend that was right and fastest in warm-up.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bcg_backends.trial import Shape, Trial, shapes_of
from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendError,
    BackendLimits,
    BackendRegistry,
    BackendUnavailableError,
    Capabilities,
    PagedKVCache,
    PrefillBatch,
    create_backend,
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Say who serves batches of a shape, and why.

    Attributes:
        shape: what was tried.
        name: the backend that serves it.
        seconds: what each right backend took for one forward of ``trial.LAYERS`` layers, preparation included.
        wrong: backends whose result was wrong, with what was wrong.
    """

    shape: Shape
    name: str
    seconds: dict[str, float]
    wrong: dict[str, str]

    def __str__(self) -> str:
        """Name the choice, then the times in microseconds, then what was wrong."""
        ranking = sorted(self.seconds, key=lambda name: self.seconds[name])
        times = ", ".join(f"{name} {self.seconds[name] * 1e6:.0f} us" for name in ranking)
        wrong = "".join(f"; {name} is wrong: {why}" for name, why in self.wrong.items())
        return f"{self.shape}: {self.name} ({times}{wrong})"


@dataclass(frozen=True, kw_only=True)
class Delegated:
    """Hold another backend's metadata beside that backend."""

    backend: AttentionBackend
    metadata: Any


class AutoBackend(AttentionBackend):
    """Choose among all registered backends by measurement.

    Every available backend that can serve the spec is warmed up, checked against attention computed in float64, and
    timed on batches like those that will come. A batch goes to the winner of the nearest shape that is not smaller. The
    choice is made once, in warm-up, so that equal batches get equal bits.

    Args:
        spec: what to serve.
        limits: bounds.
        device: where tensors live.
        registry: where candidates come from; default are all registered backends.
    """

    name = "auto"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        devices=frozenset({"cpu", "cuda"}),
        gqa=True,
        cached_prefix=True,
        supports_out=True,
        deterministic=True,
    )

    def __init__(
        self,
        spec: AttentionSpec,
        limits: BackendLimits,
        device: torch.device,
        *,
        registry: BackendRegistry | None = None,
    ) -> None:
        super().__init__(spec, limits, device)
        self.candidates, self.left_out = _candidates(
            registry or BackendRegistry(), spec, limits, device
        )
        if not self.candidates:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            raise BackendUnavailableError(self.name, f"no backend can serve this: {reasons}")
        self.choices: list[Choice] = []
        self._warming: AttentionBackend | None = None

    def warm_up(self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]) -> None:
        """Warm all candidates up, then check and time them."""
        for candidate in self.candidates.values():
            self._warming = candidate
            try:
                candidate.warm_up(batches, run)
            finally:
                self._warming = None
        self.choices = [self._choose(shape) for shape in shapes_of(batches, self.limits)]

    def _choose(self, shape: Shape) -> Choice:
        trial = Trial(shape, self.spec, self.device)
        wrong = {name: trial.fault(backend) for name, backend in self.candidates.items()}
        seconds = {
            name: trial.seconds(backend)
            for name, backend in self.candidates.items()
            if wrong[name] is None
        }
        if not seconds:
            raise BackendUnavailableError(self.name, f"no candidate is right on {shape}: {wrong}")
        return Choice(
            shape=shape,
            name=min(seconds, key=lambda name: seconds[name]),
            seconds=seconds,
            wrong={name: why for name, why in wrong.items() if why is not None},
        )

    def choose(self, batch: PrefillBatch) -> AttentionBackend:
        """Return the backend that serves ``batch``; before warm-up, the first candidate."""
        if self._warming is not None:
            return self._warming
        if not self.choices:
            return next(iter(self.candidates.values()))
        nearest = min(self.choices, key=lambda choice: choice.shape.distance(batch))
        return self.candidates[nearest.name]

    def notes(self) -> list[str]:
        """Return the choices, and the backends that had no part in them."""
        left_out = [f"left out {name}: {why}" for name, why in self.left_out.items()]
        return [*map(str, self.choices), *left_out]

    def init_forward_metadata(self, batch: PrefillBatch) -> Delegated:
        """Prepare with the backend that serves ``batch``."""
        backend = self.choose(batch)
        return Delegated(backend=backend, metadata=backend.init_forward_metadata(batch))

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Delegated,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Run the backend that prepared ``metadata``, and copy its result if it does not write ``out``."""
        backend = metadata.backend
        offered = out_RNH if backend.capabilities.supports_out else None
        result = backend.forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata.metadata, offered)
        if out_RNH is None or offered is not None:
            return result
        return out_RNH.copy_(result)


def _candidates(
    registry: BackendRegistry, spec: AttentionSpec, limits: BackendLimits, device: torch.device
) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
    """Make every registered backend that can serve ``spec``, and say why the others cannot."""
    made: dict[str, AttentionBackend] = {}
    left_out: dict[str, str] = {}
    for name in registry.names():
        try:
            backend = registry.load(name)
            if issubclass(backend, AutoBackend):
                continue
            variants = backend.variants()
        except BackendError as error:
            left_out[name] = str(error)
            continue
        for options in variants:
            selected, _ = backend.select(options)
            try:
                made[selected.name] = create_backend(backend, spec, limits, device, **options)
            except BackendError as error:
                left_out[selected.name] = str(error)
    return made, left_out
