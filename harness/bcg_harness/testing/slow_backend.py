"""A correct backend that holds the host up, to show where lost time appears.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from time import perf_counter

from torch import Tensor

from bcg_core import AttentionBackend, Metadata, PagedKVCache
from bcg_harness.delegating import DelegatingBackend


class SlowBackend(DelegatingBackend):
    """Delegate to ``inner``, after ``seconds`` of doing nothing on the host in every layer.

    Busy waiting, because a sleep as short as a launch takes several times as long as it was asked for.
    """

    def __init__(self, inner: AttentionBackend, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

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
        """Wait, and delegate."""
        until = perf_counter() + self.seconds
        while perf_counter() < until:
            pass
        return super().forward(q_RNH, k_RKH, v_RKH, kv_cache, layer, metadata, out_RNH)
