"""What the variable-length kernels have in common: index arrays, and where keys and values are read.

Shape letters: R real tokens, B requests, W pages of a request, S keys of all requests, N query heads, K KV heads,
H head dim.
"""

from abc import abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from bcg_core import AttentionBackend, AttentionSpec, BackendLimits, PagedKVCache, PrefillBatch


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


class VarlenBuffers:
    """Keep a bucket's index arrays at fixed addresses, refreshed in place by ``load``.

    Requests beyond the live ones have no tokens and no keys, so a kernel may be launched for all of them.
    """

    def __init__(self, limits: BackendLimits, page_size: int, device: torch.device) -> None:
        requests = limits.max_requests
        self._counts = torch.zeros(3, requests + 1, dtype=torch.int32, device=device)
        width = -(-limits.max_context // page_size)
        self._page_table_BW = torch.zeros(requests, width, dtype=torch.int32, device=device)

    def load(self, batch: PrefillBatch, source: KeySource) -> VarlenMetadata:
        """Put the indices of ``batch`` into the buffers, and return views of the live requests."""
        count = batch.num_requests
        host = torch.zeros(self._counts.shape, dtype=torch.int32)
        host[0] = batch.num_tokens
        host[1] = batch.cu_kv_lens[-1]
        host[0, : count + 1] = torch.tensor(batch.cu_new_lens, dtype=torch.int32)
        host[1, : count + 1] = torch.tensor(batch.cu_kv_lens, dtype=torch.int32)
        host[2, :count] = torch.tensor(batch.kv_lens, dtype=torch.int32)
        self._counts.copy_(host, non_blocking=True)
        width = batch.page_table_BW.shape[1]
        self._page_table_BW[:count, :width].copy_(batch.page_table_BW, non_blocking=True)
        return VarlenMetadata(
            source=source,
            cu_new_lens=self._counts[0, : count + 1],
            cu_kv_lens=self._counts[1, : count + 1],
            kv_lens=self._counts[2, :count],
            page_table_BW=self._page_table_BW[:count],
            max_new_len=batch.max_new_len,
            max_kv_len=batch.max_kv_len,
            slots_S=batch.kv_slots if source is KeySource.GATHERED else None,
        )


class VarlenBackend(AttentionBackend):
    """Serve a whole batch with one kernel launch a layer.

    Batches without cached tokens attend over the new rows in place. Otherwise keys and values come from the pages, or,
    where the kernel cannot read pages of this size, from a gathered copy. A subclass makes the two kernel calls.
    """

    def reads_pages(self, spec: AttentionSpec) -> bool:
        """Tell whether the kernel reads pages of this spec through a page table; False is the default."""
        return False

    @abstractmethod
    def attend_flat(
        self,
        q_RNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend over keys laid out request after request; see ``AttentionBackend.forward`` for the result."""

    def attend_pages(
        self,
        q_RNH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: VarlenMetadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Attend over the pages of ``layer``; called only where ``reads_pages`` holds."""
        raise AssertionError("a backend that reads no pages was given some")

    def _source(self, batch: PrefillBatch) -> KeySource:
        if not any(batch.prefix_lens):
            return KeySource.NEW
        return KeySource.PAGES if self.reads_pages(self.spec) else KeySource.GATHERED

    def init_forward_metadata(self, batch: PrefillBatch) -> VarlenMetadata:
        """Take the batch's own device arrays."""
        source, index = self._source(batch), batch.on_device
        return VarlenMetadata(
            source=source,
            cu_new_lens=index.cu_new_lens,
            cu_kv_lens=index.cu_kv_lens,
            kv_lens=index.kv_lens,
            page_table_BW=index.page_table_BW,
            max_new_len=batch.max_new_len,
            max_kv_len=batch.max_kv_len,
            slots_S=batch.kv_slots if source is KeySource.GATHERED else None,
        )

    def init_bucket_metadata(self, bucket: int) -> VarlenBuffers:
        """Allocate fixed-address index arrays for the most requests of a batch."""
        return VarlenBuffers(self.limits, self.spec.page_size, self.device)

    def update_bucket_metadata(
        self, metadata: VarlenBuffers | None, batch: PrefillBatch
    ) -> VarlenMetadata:
        """Refresh the bucket's arrays for ``batch``."""
        assert metadata is not None, "init_bucket_metadata always returns buffers"
        return metadata.load(batch, self._source(batch))

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
            return self.attend_pages(q_RNH, kv_cache, layer, metadata, out_RNH)
        if metadata.slots_S is not None:
            keys, values = kv_cache.flat(layer)
            k_RKH = keys.index_select(0, metadata.slots_S)
            v_RKH = values.index_select(0, metadata.slots_S)
        return self.attend_flat(q_RNH, k_RKH, v_RKH, metadata, out_RNH)
