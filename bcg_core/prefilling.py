"""What a prefill does to the sequences of its batch."""

from types import TracebackType

from bcg_core.batch import PrefillBatch
from bcg_core.errors import BatchError
from bcg_core.runner_checks import check_unchanged


class Prefilling:
    """Count the new tokens of ``batch`` as cached when the ``with`` block ends well.

    From its beginning on, what lies behind the prefixes does not count: the block overwrites it. Pages that a sequence
    gives back inside the block go to nobody before its end. Raises BatchError, naming the request, for a sequence that
    another prefill is about, and at the end for one that was freed, trimmed or rewound inside; nothing counts then.
    """

    # A class, as a generator costs two microseconds more.
    __slots__ = ("_batch", "_flight", "_holders")

    def __init__(self, batch: PrefillBatch) -> None:
        self._batch = batch
        self._holders = batch.kv_cache.holders

    def __enter__(self) -> None:
        """Take the sequences."""
        batch, holders = self._batch, self._holders
        with holders.lock:
            busy = holders.in_flight(batch.sequences)
            if busy is not None:
                raise BatchError(
                    f"request {busy}: its sequence is in a prefill that has not ended yet"
                )
            self._flight = holders.depart(batch.sequences)
            for sequence, prefix, length in zip(
                batch.sequences, batch.prefix_lens, batch.kv_lens, strict=False
            ):
                if sequence._written > length:
                    holders.unclean.update(sequence._pages[length // batch.page_size :])
                sequence._written = sequence._cached = prefix

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Count the tokens, or remember what may be left in their pages."""
        batch, holders = self._batch, self._holders
        counted = False
        with holders.lock:
            try:
                if exc is None:
                    check_unchanged(batch)
                    for sequence, length in zip(batch.sequences, batch.kv_lens, strict=False):
                        sequence._written = sequence._cached = length
                    counted = True
            finally:
                if not counted:
                    for pages, prefix in zip(batch.pages, batch.prefix_lens, strict=False):
                        holders.unclean.update(pages[prefix // batch.page_size :])
                holders.land(self._flight)


def clear_tails(batch: PrefillBatch) -> None:
    """Zero the slots behind the last token of each request, in pages where somebody else's may be left.

    A kernel that loads whole pages multiplies them by 0, which is NaN for NaN. All slots before are the request's own:
    the segments write them ahead of attention. One kernel over all layers, none when no last page is in question.
    """
    unclean, size = batch.kv_cache.holders.unclean, batch.page_size
    if not unclean:
        return
    slots: list[int] = []
    for pages, length in zip(batch.pages, batch.kv_lens, strict=False):
        last = pages[-1]
        if last in unclean:
            unclean.discard(last)
            used = (length - 1) % size + 1
            slots.extend(range(last * size + used, (last + 1) * size))
    if slots:
        batch.kv_cache.clear_slots(slots)
