"""Everything a forward of up to M tokens reads and writes at fixed addresses.

Shape letters: M most tokens, T bucket (padded) tokens, R real tokens, D model dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bcg_core.allocation import allocating
from bcg_core.batch import PrefillBatch
from bcg_core.boundary import BoundaryBuffers, token_boundary_bytes
from bcg_core.errors import BucketError
from bcg_core.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class StaticInputs:
    """View the index inputs of a forward over T tokens, int64 on the device.

    Attributes:
        packed: all three, ``[3 * T]``, the target of one transfer.
        input_ids_T: token ids.
        positions_T: positions.
        slot_mapping_T: flat KV slots.
    """

    packed: Tensor
    input_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor


class Workspace:
    """Own static inputs, boundary buffers and hidden states of up to ``max_tokens`` tokens.

    Forwards of all buckets use the same memory, one after the other.

    Attributes:
        boundary: q, k, v and attention output.
        hidden_MD: the model's result; rows of the last forward, valid until the next.

    Raises BucketError, with the number that fits, for more tokens than the device has memory for.
    """

    def __init__(self, spec: ModelSpec, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        hidden_bytes, input_bytes = spec.hidden_size * spec.dtype.itemsize, 3 * torch.int64.itemsize
        token_bytes = token_boundary_bytes(spec) + hidden_bytes + input_bytes
        with allocating("a bucket", max_tokens, "tokens", token_bytes, spec.device, BucketError):
            self.boundary = BoundaryBuffers(spec, max_tokens)
            self.hidden_MD = torch.zeros(
                max_tokens, spec.hidden_size, dtype=spec.dtype, device=spec.device
            )
            self._packed_inputs = torch.zeros(3 * max_tokens, dtype=torch.int64, device=spec.device)

    def inputs(self, padded: int) -> StaticInputs:
        """Return the inputs of a forward over ``padded`` tokens; their address depends on that number alone."""
        packed = self._packed_inputs[: 3 * padded]
        ids, positions, slots = packed.view(3, padded)
        return StaticInputs(
            packed=packed, input_ids_T=ids, positions_T=positions, slot_mapping_T=slots
        )

    def load(self, batch: PrefillBatch, inputs: StaticInputs) -> None:
        """Copy the batch's indices into ``inputs`` in one transfer; padded rows become token 0 at slot 0."""
        host = torch.zeros(3, inputs.input_ids_T.shape[0], dtype=torch.int64, device="cpu")
        real = batch.num_tokens
        host[0, :real] = batch.input_ids_R
        host[1, :real] = batch.positions_R
        host[2, :real] = batch.slot_mapping_R
        inputs.packed.copy_(host.view(-1), non_blocking=True)
