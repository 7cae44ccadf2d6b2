"""A backend that leaves everything to another one: the base of those that watch or disturb it.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from bcg_core import AttentionBackend, Metadata, PagedKVCache, PrefillBatch


class DelegatingBackend(AttentionBackend):
    """Delegate every call to ``inner``; name and capabilities are those of ``inner`` too."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner.spec, inner.limits, inner.device)
        self.inner = inner
        # The protocol makes these class attributes; a wrapper has them from the instance that it wraps.
        vars(self).update(name=inner.name, capabilities=inner.capabilities)

    def init_forward_metadata(self, batch: PrefillBatch) -> Metadata:
        """Delegate."""
        return self.inner.init_forward_metadata(batch)

    def init_bucket_metadata(self, bucket: int) -> Metadata | None:
        """Delegate."""
        return self.inner.init_bucket_metadata(bucket)

    def update_bucket_metadata(self, metadata: Metadata | None, batch: PrefillBatch) -> Metadata:
        """Delegate."""
        return self.inner.update_bucket_metadata(metadata, batch)

    def refuse_full_graph(self) -> str | None:
        """Delegate."""
        return self.inner.refuse_full_graph()

    def full_graph_metadata(self, metadata: Metadata | None, bucket: int) -> Metadata:
        """Delegate; ``forward`` does not run at replay then."""
        return self.inner.full_graph_metadata(metadata, bucket)

    def notes(self) -> list[str]:
        """Delegate."""
        return self.inner.notes()

    def warm_up(self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]) -> None:
        """Delegate."""
        self.inner.warm_up(batches, run)

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
        """Delegate."""
        return self.inner.forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
