"""What a prefill does to the sequences of its batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from bcg_core.batch import PrefillBatch
from bcg_core.errors import BatchError
from bcg_core.runner_checks import check_unchanged


@contextmanager
def prefilling(batch: PrefillBatch) -> Iterator[None]:
    """Count the new tokens of ``batch`` as cached when the ``with`` block ends well.

    From its beginning on, what lies behind the prefixes does not count: the block overwrites it. Pages that a sequence
    gives back inside the block go to nobody before its end. Raises BatchError, naming the request, for a sequence that
    another prefill is about, and at the end for one that was freed, trimmed or rewound inside; nothing counts then.
    """
    holders, sequences, size = batch.kv_cache.holders, batch.sequences, batch.page_size
    with holders.lock:
        busy = holders.in_flight(sequences)
        if busy is not None:
            raise BatchError(f"request {busy}: its sequence is in a prefill that has not ended yet")
        flight = holders.depart(sequences)
        for sequence, prefix, length in zip(
            sequences, batch.prefix_lens, batch.kv_lens, strict=False
        ):
            if sequence._written != prefix:
                if sequence._written > length:
                    holders.unclean.update(sequence._pages[length // size :])
                sequence._written = prefix
            sequence._cached = prefix
        held = [sequence._pages for sequence in sequences]
        prefixes = [sequence._cached for sequence in sequences]
    try:
        yield
        with holders.lock:
            # Unchanged tuples of pages are the same object, which makes this quick.
            if [sequence._pages for sequence in sequences] != held or [
                sequence._cached for sequence in sequences
            ] != prefixes:
                check_unchanged(batch)
            for sequence, length in zip(sequences, batch.kv_lens, strict=False):
                sequence._written = sequence._cached = length
    except BaseException:
        for pages, prefix in zip(batch.pages, batch.prefix_lens, strict=False):
            holders.unclean.update(pages[prefix // size :])
        raise
    finally:
        holders.land(flight)


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
