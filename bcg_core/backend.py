"""What an attention backend implements, and nothing more.

Shape letters: R real tokens, B requests, N query heads, K KV heads, H head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bcg_core.batch import PrefillBatch
from bcg_core.errors import UnsupportedSpecError
from bcg_core.kv_cache import PagedKVCache
from bcg_core.spec import AttentionSpec, BackendLimits

Metadata = Any
"""What a backend prepares for a batch; the core passes it on and never looks inside."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Declare what a backend can do. Every default is the cautious answer, so a plug-in names only what it has.

    Attributes:
        dtypes: element types it takes.
        head_dims: head dims it takes; None for any.
        page_multiple: page sizes it takes are multiples of this.
        preferred_page_multiple: pages of multiples of this are read in place, where others would be copied first.
        devices: device types it runs on.
        min_compute_capability: oldest GPU it runs on, as (major, minor); None where that does not matter.
        gqa: takes fewer KV heads than query heads.
        cached_prefix: takes requests that have cached tokens before the new ones.
        ignores_foreign_nan: NaN in cache slots that hold none of a request's tokens never reaches its result. For a
            backend without it, the core zeroes what others left behind the last token in a request's last page.
        supports_out: writes its result into ``out`` and returns that tensor; otherwise the core copies, and counts it.
        needs_host_plan: plans on the host for each batch, so a batch costs more than its launches.
        supports_full_graph: its ``forward`` may itself be captured, with what ``full_graph_metadata`` returns.
        deterministic: the same call gives the same bits.
    """

    dtypes: frozenset[torch.dtype] = frozenset({torch.float16, torch.bfloat16})
    head_dims: frozenset[int] | None = frozenset({64, 128})
    page_multiple: int = 1
    preferred_page_multiple: int = 1
    devices: frozenset[str] = frozenset({"cuda"})
    min_compute_capability: tuple[int, int] | None = None
    gqa: bool = False
    cached_prefix: bool = False
    ignores_foreign_nan: bool = False
    supports_out: bool = False
    needs_host_plan: bool = True
    supports_full_graph: bool = False
    deterministic: bool = False

    def refuse(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """Say which declared limit ``spec`` on ``device`` exceeds; None when all are kept."""
        if device.type not in self.devices:
            return f"devices: runs on {', '.join(sorted(self.devices))}, not on {device.type}"
        if spec.dtype not in self.dtypes:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
            return f"dtypes: takes {names}, not {str(spec.dtype).removeprefix('torch.')}"
        if self.head_dims is not None and spec.head_dim not in self.head_dims:
            return f"head_dims: takes {sorted(self.head_dims)}, not {spec.head_dim}"
        if spec.page_size % self.page_multiple:
            return f"page_multiple: takes multiples of {self.page_multiple}, not {spec.page_size}"
        if spec.group_size != 1 and not self.gqa:
            return f"gqa: takes as many KV heads as query heads, not {spec.num_kv_heads} for {spec.num_heads}"
        if self.min_compute_capability is not None and device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
            if found < self.min_compute_capability:
                return f"min_compute_capability: needs {self.min_compute_capability}, this GPU has {found}"
        return None


class AttentionBackend(ABC):
    """Serve causal attention over a paged KV cache, between the segments of a captured forward.

    A subclass declares ``name`` and ``capabilities``, prepares metadata once per batch, and computes one layer at a
    time in ``forward``. All work goes to the current stream. Because attention is outside the segments, nothing here
    is captured and no address has to stay, except in the full graphs that a backend may support besides.

    Args:
        spec: shape, dtype and page size to serve.
        limits: bounds for workspaces.
        device: where tensors live.

    Further keyword arguments of a subclass are its options. Annotate them: what a command line gives as text becomes
    what the annotation says.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        self.spec = spec
        self.limits = limits
        self.device = device

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        """Return the sets of options that are worth checking one by one; the default is a single, empty set."""
        return ({},)

    @classmethod
    def select(cls, options: Mapping[str, Any]) -> tuple[type["AttentionBackend"], dict[str, Any]]:
        """Choose the class that serves ``options``, and return it with the options left for its constructor.

        For a backend that covers several kernels or versions of a library whose capabilities differ: it registers one
        class, and this method returns the subclass that an option names. The default returns this class. Raises
        BackendOptionError for a value that is not possible.
        """
        return cls, dict(options)

    @classmethod
    def unavailable(cls) -> str | None:
        """Say what is missing to run at all, with the command that installs it; None when nothing is."""
        return None

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Say why ``spec`` cannot be served on ``device``; None when it can.

        The default reads the capability record; a subclass adds limits that depend on several fields at once.
        """
        return cls.capabilities.refuse(spec, device)

    @classmethod
    def expected_failures(cls) -> Mapping[str, str]:
        """Return what is known to fail in the conformance kit and ``bcg check``: from pattern to reason, default none.

        A pattern is matched, as in ``fnmatch``, against ``check-case``: ``raw_shape-*`` is one check in every case. A
        reason tells a user what does not work, and until when. A pattern whose tests all pass makes both fail.
        """
        return {}

    @abstractmethod
    def init_forward_metadata(self, batch: PrefillBatch) -> Metadata:
        """Prepare for the live, unpadded ``batch``; called once per forward, before its first segment.

        May plan on the host. Never called without requests. The result is passed to every layer's ``forward``, and that
        alone says what to compute. It stays valid while one more batch is prepared and attended to, so that two may be
        in flight at once, and whatever other instances of the class do.
        """

    def init_bucket_metadata(self, bucket: int) -> Metadata | None:
        """Make metadata with fixed addresses for batches of up to ``bucket`` tokens; called once, at capture.

        None, the default, means that this backend has only the ordinary path.
        """
        return None

    def update_bucket_metadata(self, metadata: Metadata | None, batch: PrefillBatch) -> Metadata:
        """Refresh the bucket's ``metadata`` in place for ``batch`` before a replay, and return what to pass on.

        What it returns is valid until the next call for the same bucket.
        The default prepares anew through ``init_forward_metadata``.
        """
        return self.init_forward_metadata(batch)

    def refuse_full_graph(self) -> str | None:
        """Say why attention of this spec cannot be captured together with the model; None when it can.

        The default reads the capability record; a subclass adds limits that only full graphs have.
        """
        if self.capabilities.supports_full_graph:
            return None
        return "supports_full_graph: it does not declare that its forward can be captured"

    def full_graph_metadata(self, metadata: Metadata | None, bucket: int) -> Metadata:
        """Return what a captured ``forward`` over all ``bucket`` rows is given; called once, before the capture.

        It views the bucket's ``metadata`` so that nothing depends on a batch: fixed addresses, a slot for every request
        there can be, upper bounds in place of maxima, and the KV cache as the one source of keys, because one graph
        serves batches with and without a prefix. Before each replay ``update_bucket_metadata`` puts the batch there;
        slots beyond its requests have no tokens.

        ``forward`` with it runs once before the capture, without any request, to compile and allocate; then at the
        capture; never at a replay, so it must not read Python state that changes from batch to batch. It leaves rows of
        no request alone, or makes them zero.

        The default raises UnsupportedSpecError; ``refuse_full_graph`` says so beforehand.
        """
        raise UnsupportedSpecError(
            self.name, self.refuse_full_graph() or "full_graph_metadata is not implemented"
        )

    @abstractmethod
    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Metadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend causally, each new token to its prefix and the new tokens up to itself (bottom-right).

        Keys and values of these R tokens are in the cache already. q, k and v are views with contiguous heads and
        strided rows; they and ``out_RNH`` belong to the caller and are overwritten by the next layer.

        Args:
            q_RNH: rotated queries.
            k_RKH: rotated keys of the new tokens.
            v_RKH: values of the new tokens.
            kv_cache: the paged cache; read pages through the batch's page table.
            layer: which layer's cache to read.
            metadata: what was prepared for this batch.
            out_RNH: contiguous output rows, given when ``supports_out`` is declared: write them and return this very
                tensor. Rows beyond R must not be touched.

        Returns:
            ``[R, N, H]`` in the dtype of q; a tensor other than ``out_RNH`` is copied by the core.
        """

    def notes(self) -> list[str]:
        """Return what a report should say of this instance, a line each; nothing by default."""
        return []

    def warm_up(self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]) -> None:
        """Compile and allocate everything lazy before captures and serving.

        The default runs every batch once. ``batches`` are representative of the buckets; ``run`` does one forward of a
        single layer of this backend on scratch memory.
        """
        for batch in batches:
            run(batch)
