"""Backends that are ready for the captured buckets: warmed up, with their metadata of each bucket."""

from collections.abc import Collection
from dataclasses import fields

from bcg_core.backend import AttentionBackend, Metadata
from bcg_core.batch import PrefillBatch
from bcg_core.boundary import BoundaryBuffers
from bcg_core.context import ForwardContext, Phase, attention
from bcg_core.errors import UnsupportedSpecError
from bcg_core.kv_cache import PagedKVCache
from bcg_core.notes import noting
from bcg_core.spec import BackendLimits
from bcg_core.warm_up import warm_up_batches


class PreparedBackends:
    """Prepare backends for buckets, each once, and keep what they made.

    Args:
        limits: of the batches to come.
        kv_cache: what backends attend over.
    """

    def __init__(self, limits: BackendLimits, kv_cache: PagedKVCache) -> None:
        self._limits = limits
        self._kv_cache = kv_cache
        self._metadata: dict[AttentionBackend, dict[int, Metadata]] = {}

    def add(
        self, backend: AttentionBackend, sizes: Collection[int], scratch: BoundaryBuffers
    ) -> None:
        """Warm ``backend`` up for the buckets ``sizes`` on rows of ``scratch``, and make its metadata of each.

        Does nothing for one that is prepared. Raises BackendContractError for a ``forward`` whose result would be
        refused in a prefill.
        """
        if backend in self._metadata:
            return
        batches = warm_up_batches(
            sizes,
            self._limits,
            self._kv_cache,
            cached_prefix=backend.capabilities.cached_prefix,
        )
        with noting(f"raised in warm-up of backend {backend.name!r}"):
            backend.warm_up(batches, lambda batch: self._attend(backend, batch, scratch))
        with noting(f"raised while making bucket metadata of backend {backend.name!r}"):
            metadata = {size: backend.init_bucket_metadata(size) for size in sizes}
        self._metadata[backend] = metadata

    def _attend(
        self, backend: AttentionBackend, batch: PrefillBatch, scratch: BoundaryBuffers
    ) -> None:
        metadata = backend.init_forward_metadata(batch)
        context = ForwardContext(self._kv_cache)
        context.begin(Phase.WARM_UP, scratch, batch.num_tokens, batch.slot_mapping_R)
        context.bind(batch, backend, metadata)
        attention(context, 0)

    def bucket(self, backend: AttentionBackend, size: int) -> Metadata | None:
        """Return the metadata that ``backend`` made for the bucket ``size``."""
        return self._metadata[backend][size]

    def add_full_graphs(
        self, backend: AttentionBackend, sizes: Collection[int], scratch: BoundaryBuffers
    ) -> dict[int, Metadata]:
        """Add ``backend``, and return what its captured ``forward`` is given in each bucket.

        Raises UnsupportedSpecError, before anything is warmed up, for a backend whose attention cannot be captured.
        """
        reason = backend.refuse_full_graph() or self._narrower(backend.limits)
        if reason is not None:
            raise UnsupportedSpecError(
                backend.name,
                f"no full graph: {reason}. Choose a backend that can, or capture with breaks (full_graph=False), which "
                "works with any",
            )
        self.add(backend, sizes, scratch)
        with noting(f"raised while making full-graph metadata of backend {backend.name!r}"):
            return {
                size: backend.full_graph_metadata(self.bucket(backend, size), size)
                for size in sizes
            }

    def _narrower(self, limits: BackendLimits) -> str | None:
        """Say which limit of a backend is below what batches may have: captured as a bound, it would cut them."""
        for field in fields(limits):
            bound, needed = getattr(limits, field.name), getattr(self._limits, field.name)
            if bound < needed:
                return f"made for {field.name} of {bound}, but this runner serves {needed}"
        return None

    def drop(self, backend: AttentionBackend) -> None:
        """Drop what was made for ``backend``, if anything was."""
        self._metadata.pop(backend, None)

    def clear(self) -> None:
        """Drop everything that was made."""
        self._metadata = {}
