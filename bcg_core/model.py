"""What a model must offer to be captured in segments.

Shape letters: T bucket (padded) tokens, B requests, D model dim, V vocabulary.
"""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from bcg_core.spec import ModelSpec

if TYPE_CHECKING:
    from bcg_core.context import ForwardContext


@runtime_checkable
class PrefillModel(Protocol):
    """Compute hidden states of T tokens, calling ``ctx.attend(layer)`` once for each layer.

    ``forward`` runs once per bucket while segments are captured and never again at replay. So it may not read device
    values on the host, may not depend on anything but its tensors' addresses, and treats all T rows alike: which rows
    are padding is known to the context alone.
    """

    @property
    def spec(self) -> ModelSpec:
        """Return the shapes of this model."""

    def forward(self, input_ids_T: Tensor, positions_T: Tensor, ctx: "ForwardContext") -> Tensor:
        """Return the normalised hidden states ``[T, D]`` that the LM head reads.

        For each layer the model writes q, k and v of all T rows into ``ctx.io`` (``qkv_TX``, then RoPE in place on
        ``qk_TAH``), calls ``ctx.attend(layer)`` and reads the attention output from ``ctx.io.out_TX``.

        Args:
            input_ids_T: int64, padded with 0.
            positions_T: int64, position in its request, padded with 0.
            ctx: the runner's context.
        """

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits ``[B, V]`` of the hidden states ``[B, D]``; runs eagerly, outside segments."""
