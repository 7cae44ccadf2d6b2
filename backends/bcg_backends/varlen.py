"""What the variable-length kernels have in common: index arrays, and where keys and values are read.

Shape letters: R real tokens, B requests, P pages, W pages of a request, S keys of all requests, N query heads,
K KV heads, H head dim.
"""

from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    DeviceIndices,
    PagedKVCache,
    PrefillBatch,
    UnsupportedSpecError,
)


class KeySource(Enum):
    """Name where a kernel reads the keys and values of a batch."""

    NEW = "new"
    """The new tokens' own rows; nothing is cached before them."""
    PAGES = "pages"
    """The cache, through the page table."""
    GATHERED = "gathered"
    """A copy of the cache's rows, for kernels that cannot read these pages."""


@dataclass(frozen=True, kw_only=True)
class VarlenMetadata:
    """Hold what a variable-length kernel is told of a batch.

    Attributes:
        source: where keys and values are read.
        cu_new_lens: int32 on the device, B + 1 offsets of new tokens.
        cu_kv_lens: int32 on the device, B + 1 offsets of keys.
        kv_lens: int32 on the device, B key counts.
        page_table_BW: int32 on the device.
        max_new_len: longest run of new tokens.
        max_kv_len: most keys of a request.
        slots_S: int64 on the device, the rows to gather; None unless gathered.
    """

    source: KeySource
    cu_new_lens: Tensor
    cu_kv_lens: Tensor
    kv_lens: Tensor
    page_table_BW: Tensor
    max_new_len: int
    max_kv_len: int
    slots_S: Tensor | None

    @classmethod
    def of(cls, batch: PrefillBatch, source: KeySource, index: DeviceIndices) -> "VarlenMetadata":
        """Describe ``batch``, whose index arrays are in ``index``."""
        return cls(
            source=source,
            max_new_len=batch.max_new_len,
            max_kv_len=batch.max_kv_len,
            slots_S=batch.kv_slots if source is KeySource.GATHERED else None,
            **vars(index),
        )


class VarlenBuffers:
    """Keep a bucket's index arrays at fixed addresses, refreshed in place by ``load``.

    Requests beyond the live ones have no tokens and no keys, so a kernel may be launched for all of them.
    """

    def __init__(self, limits: BackendLimits, page_size: int, device: torch.device) -> None:
        self._limits = limits
        requests = limits.max_requests
        self._counts = torch.zeros(3, requests + 1, dtype=torch.int32, device=device)
        width = -(-limits.max_context // page_size)
        self._page_table_BW = torch.zeros(requests, width, dtype=torch.int32, device=device)

    def load(self, batch: PrefillBatch, source: KeySource) -> VarlenMetadata:
        """Put the indices of ``batch`` into the buffers, and return views of the live requests."""
        count = batch.num_requests
        host = torch.zeros(self._counts.shape, dtype=torch.int32, device="cpu")
        host[0] = batch.num_tokens
        host[1] = batch.cu_kv_lens[-1]
        host[0, : count + 1] = torch.tensor(batch.cu_new_lens, dtype=torch.int32, device="cpu")
        host[1, : count + 1] = torch.tensor(batch.cu_kv_lens, dtype=torch.int32, device="cpu")
        host[2, :count] = torch.tensor(batch.kv_lens, dtype=torch.int32, device="cpu")
        self._counts.copy_(host, non_blocking=True)
        width = batch.page_table_BW.shape[1]
        self._page_table_BW[:count, :width].copy_(batch.page_table_BW, non_blocking=True)
        return VarlenMetadata.of(batch, source, self._slots(count))

    def full(self, bucket: int) -> VarlenMetadata:
        """Return views of every request slot that a batch of up to ``bucket`` tokens can need, for a full graph.

        Lengths that a launch takes from the host are the longest there can be.
        """
        return VarlenMetadata(
            source=KeySource.PAGES,
            max_new_len=min(self._limits.max_context, bucket),
            max_kv_len=self._limits.max_context,
            slots_S=None,
            **vars(self._slots(min(self._limits.max_requests, bucket))),
        )

    def _slots(self, count: int) -> DeviceIndices:
        """View the first ``count`` request slots."""
        return DeviceIndices(
            cu_new_lens=self._counts[0, : count + 1],
            cu_kv_lens=self._counts[1, : count + 1],
            kv_lens=self._counts[2, :count],
            page_table_BW=self._page_table_BW[:count],
        )


def refuse_page_size(spec: AttentionSpec, multiple: int) -> str | None:
    """Say why a kernel that reads pages of multiples of ``multiple`` tokens cannot read those of ``spec``."""
    if spec.page_size % multiple == 0:
        return None
    return f"it reads pages of multiples of {multiple} tokens, not of {spec.page_size}"


class VarlenBackend(AttentionBackend):
    """Serve a whole batch with one kernel launch a layer.

    Batches without cached tokens attend over the new rows in place. Otherwise keys and values come from the pages, or,
    where the kernel cannot read pages of this size, from a gathered copy. A subclass makes the kernel call.
    """

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self.reads_pages = self.refuse_pages(spec) is None

    @classmethod
    def refuse_pages(cls, spec: AttentionSpec) -> str | None:
        """Say why the kernel cannot read pages of this spec through a page table; None when it can.

        The default is a kernel that reads none.
        """
        return "it reads no pages"

    @abstractmethod
    def launch(
        self,
        q_RNH: Tensor,
        keys: Tensor,
        values: Tensor,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
        *,
        paged: bool,
    ) -> Tensor:
        """Make the one kernel call; see ``AttentionBackend.forward`` for the result.

        Args:
            q_RNH: queries.
            keys: ``[S, K, H]``, request after request, or the pages ``[P, page size, K, H]``.
            values: likewise.
            metadata: of the batch.
            out_RNH: written in place, where that is declared.
            paged: read keys and values through the page table; only where ``refuse_pages`` permits it.
        """

    def _source(self, batch: PrefillBatch) -> KeySource:
        if not any(batch.prefix_lens):
            return KeySource.NEW
        return KeySource.PAGES if self.reads_pages else KeySource.GATHERED

    def init_forward_metadata(self, batch: PrefillBatch) -> VarlenMetadata:
        """Take the batch's own device arrays."""
        return VarlenMetadata.of(batch, self._source(batch), batch.on_device)

    def init_bucket_metadata(self, bucket: int) -> VarlenBuffers:
        """Allocate fixed-address index arrays for the most requests of a batch."""
        return VarlenBuffers(self.limits, self.spec.page_size, self.device)

    def update_bucket_metadata(
        self, metadata: VarlenBuffers | None, batch: PrefillBatch
    ) -> VarlenMetadata:
        """Refresh the bucket's arrays for ``batch``."""
        assert metadata is not None, "init_bucket_metadata always returns buffers"
        return metadata.load(batch, self._source(batch))

    def refuse_full_graph(self) -> str | None:
        """Add that all keys must be readable through the page table."""
        reason = self.refuse_pages(self.spec)
        if reason is not None:
            return f"one graph must serve batches with a prefix, and so read all keys from pages, but {reason}"
        return super().refuse_full_graph()

    def full_graph_metadata(self, metadata: VarlenBuffers | None, bucket: int) -> VarlenMetadata:
        """View all request slots of the bucket's arrays."""
        reason = self.refuse_full_graph()
        if reason is not None:
            raise UnsupportedSpecError(self.name, reason)
        assert metadata is not None, "init_bucket_metadata always returns buffers"
        return metadata.full(bucket)

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend over whatever ``metadata.source`` names."""
        if metadata.source is KeySource.PAGES:
            assert self.reads_pages, "a backend that reads no pages was given some"
            keys, values = kv_cache.keys(layer), kv_cache.values(layer)
            return self.launch(q_RNH, keys, values, metadata, out_RNH, paged=True)
        if metadata.slots_S is not None:
            keys, values = kv_cache.flat(layer)
            k_RKH = keys.index_select(0, metadata.slots_S)
            v_RKH = values.index_select(0, metadata.slots_S)
        return self.launch(q_RNH, k_RKH, v_RKH, metadata, out_RNH, paged=False)
