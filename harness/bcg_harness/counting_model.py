"""A model around the one under test, which counts how often it runs.

Shape letters: T padded tokens, B requests, D model dim.
"""

from torch import Tensor

from bcg_core import ForwardContext, ModelSpec, PrefillModel


class CountingModel:
    """Count the forwards of a model, which must not run during a replay."""

    def __init__(self, inner: PrefillModel) -> None:
        self.inner = inner
        self.forwards = 0

    @property
    def spec(self) -> ModelSpec:
        """Return the shapes of the model."""
        return self.inner.spec

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: ForwardContext) -> Tensor:
        """Count, and delegate."""
        self.forwards += 1
        return self.inner.forward(input_ids_T, positions_T, ctx)

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        """Delegate."""
        return self.inner.compute_logits(hidden_BD)
