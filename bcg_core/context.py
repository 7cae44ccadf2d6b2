"""The one object through which segments, breaks and the runner share live state.

Shape letters: T bucket (padded) tokens, R real tokens, N query heads, K KV heads, H head dim.
"""

from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bcg_core.breaks import eager_on_graph
from bcg_core.errors import BackendContractError, CaptureError
from bcg_core.notes import add_note

if TYPE_CHECKING:
    from bcg_core.backend import AttentionBackend
    from bcg_core.batch import PrefillBatch
    from bcg_core.boundary import BoundaryBuffers, BoundaryRows
    from bcg_core.kv_cache import PagedKVCache


class Phase(Enum):
    """Name what the forward at hand is for."""

    EAGER = "eager"
    WARM_UP = "warm-up"
    CAPTURE = "capture"
    REPLAY = "replay"


class ForwardContext:
    """Carry the state of a forward; a runner has one, and breaks record it by identity.

    A break's arguments are frozen at capture. What changes from batch to batch is therefore never an argument but an
    attribute of this object, set by the runner before each forward.

    Attributes:
        phase: what this forward is for.
        io: views of the T boundary rows of this forward; what the model reads and writes.
        real: views of the first R of these rows; what the backend sees. None without a batch, all T rows when attention
            itself is captured.
        slot_mapping_T: int64 on the device, the flat KV slot of each row; padded rows point at page 0.
        batch: the live batch; None during warm-up and capture.
        backend: the attention backend of this forward.
        metadata: what that backend prepared for this batch.
        forwards: forwards begun with a batch, replays included.
        output_copies: attention results that were copied because the backend did not write ``out``.
    """

    def __init__(self, kv_cache: "PagedKVCache") -> None:
        self.kv_cache = kv_cache
        self.phase = Phase.EAGER
        self.io: BoundaryRows
        self.slot_mapping_T: Tensor
        self.real: BoundaryRows | None = None
        self.batch: PrefillBatch | None = None
        self.backend: AttentionBackend | None = None
        self.metadata: Any = None
        self.forwards = 0
        self.output_copies = 0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Explain why ``io`` and ``slot_mapping_T`` are missing before the first ``begin``."""
            if name in ("io", "slot_mapping_T"):
                raise CaptureError(
                    f"this context has no {name} yet: begin() a forward first, or let PrefillRunner do it"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def begin(
        self, phase: Phase, buffers: "BoundaryBuffers", padded: int, slot_mapping_T: Tensor
    ) -> None:
        """Point the context at ``padded`` rows of ``buffers`` for a forward without a batch."""
        self.phase = phase
        self.io = buffers.rows(0, padded)
        self.slot_mapping_T = slot_mapping_T
        self.real = self.batch = self.backend = self.metadata = None

    def bind(self, batch: "PrefillBatch", backend: "AttentionBackend", metadata: Any) -> None:
        """Give the forward its batch, and zero the attention output of its padded rows.

        Backends write real rows only, so one clearing serves all layers: what a segment reads beyond row R is zero,
        never what an earlier, longer batch left there.
        """
        real, padded = batch.num_tokens, self.io.out_TX.shape[0]
        self.batch, self.backend, self.metadata = batch, backend, metadata
        self.real = type(self.io)(
            spec=self.io.spec, qkv_TX=self.io.qkv_TX[:real], out_TX=self.io.out_TX[:real]
        )
        if real < padded:
            self.io.out_TX[real:].zero_()
        self.forwards += 1

    def bind_all(self, backend: "AttentionBackend", metadata: Any) -> None:
        """Give the forward no batch, but a backend for all its T rows: attention becomes part of what is captured.

        What a replay attends over is then up to what ``metadata`` points to.
        """
        self.backend, self.metadata, self.real = backend, metadata, self.io

    def attend(self, layer: int) -> None:
        """Write this layer's keys and values into the cache, then break for attention.

        The cache write is part of the segment that ends here and covers all T rows; attention runs between segments
        and sees the R real rows. Afterwards ``io.out_TX`` holds the attention output.
        """
        self.kv_cache.write(layer, self.io.k_TKH, self.io.v_TKH, self.slot_mapping_T)
        attention(self, layer)


@eager_on_graph
def attention(ctx: ForwardContext, layer: int) -> None:
    """Run the live backend on the real rows of ``layer``; the break between two segments.

    Without rows bound (warm-up and capture of segments) there is nothing to attend over and the backend is not called,
    so a captured graph belongs to no backend. Raises BackendContractError when the result is not ``[R, N, H]`` of the
    right dtype, on the right device. What the backend raises arrives as raised, with a note of backend and layer.
    """
    backend, real = ctx.backend, ctx.real
    if backend is None or real is None:
        return
    out_RNH = real.out_TNH
    try:
        result: Any = backend.forward(
            real.q_TNH,
            real.k_TKH,
            real.v_TKH,
            ctx.kv_cache,
            layer,
            ctx.metadata,
            out_RNH if backend.capabilities.supports_out else None,
        )
    except BaseException as error:
        add_note(error, f"raised in layer {layer} of attention backend {backend.name!r}")
        raise
    if result is out_RNH:
        return
    if not isinstance(result, Tensor):
        raise BackendContractError(
            backend.name,
            f"layer {layer}: forward returned {type(result).__name__}, expected a tensor: the one that was given as "
            "out_RNH, or another of its shape",
        )
    if (
        result.shape != out_RNH.shape
        or result.dtype != out_RNH.dtype
        or result.device != out_RNH.device
    ):
        raise BackendContractError(
            backend.name,
            f"layer {layer}: forward returned {tuple(result.shape)} {result.dtype} on {result.device}, "
            f"expected {tuple(out_RNH.shape)} {out_RNH.dtype} on {out_RNH.device}",
        )
    if result.data_ptr() != out_RNH.data_ptr() or result.stride() != out_RNH.stride():
        # A view of ``out`` at other strides cannot be copied onto itself.
        own = result.untyped_storage().data_ptr() == out_RNH.untyped_storage().data_ptr()
        out_RNH.copy_(result.clone() if own else result)
        ctx.output_copies += 1
