"""Who holds which page of a KV cache.

Shape letters: S tokens a page.
"""

from collections.abc import Iterable, Sequence
from threading import RLock

from bcg_core.errors import KVCacheError
from bcg_core.kv_sequence import KVSequence


class Flight:
    """Hold what is being prefilled.

    Attributes:
        sequences: of the batch that runs.
        left: holds the pages that they give back meanwhile, so that nobody else gets what is still written.
    """

    def __init__(self, sequences: tuple[KVSequence, ...]) -> None:
        self.sequences = sequences
        self.left: list[KVSequence] = []


class PageHolders:
    """Give pages 1 to ``num_pages - 1`` to sequences and take them back; a page is free when nobody holds it.

    Knows nothing of tensors, so that a sequence keeps no cache's memory alive. A sequence that is dropped without being
    freed keeps its pages.

    Attributes:
        num_pages: pages in all, with page 0, which nobody gets.
        page_size: S.
        shared: pages that several sequences hold.
        reserved: pages that the caller hands out by itself.
        unclean: pages that may hold what an earlier holder, or a prefill that failed, wrote there.
        managed: whether a sequence has ever got a page; page tables of the caller need reserved pages from then on.
        lock: held while pages change hands.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.shared: set[int] = set()
        self.reserved: set[int] = set()
        self.unclean: set[int] = set()
        self.managed = False
        self.lock = RLock()
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders: dict[int, tuple[KVSequence, ...]] = {}
        self._flights: list[Flight] = []

    @property
    def free(self) -> int:
        """Return how many pages are free."""
        return len(self._free)

    def of(self, page: int) -> tuple[KVSequence, ...]:
        """Return who holds ``page``."""
        return self._holders.get(page, ())

    def admits(self, sequence: KVSequence) -> bool:
        """Tell whether ``sequence`` holds pages of no other cache."""
        return sequence._holders is self or sequence._holders is None

    def check(self, sequence: KVSequence) -> None:
        """Refuse a sequence of another cache."""
        if not self.admits(sequence):
            raise KVCacheError(
                f"the sequence holds {len(sequence.pages)} pages of another KV cache: free it there first"
            )

    def take(self, sequence: KVSequence, count: int, what: str) -> tuple[int, ...]:
        """Give ``sequence`` ``count`` free pages behind its own; ``what`` says in an error what needs them."""
        with self.lock:
            pages = self._pop(count, what)
            for page in pages:
                self._holders[page] = (sequence,)
            self._assign(sequence, sequence._pages + pages)
        return pages

    def share(self, sequence: KVSequence, pages: tuple[int, ...]) -> None:
        """Have ``sequence``, which holds none, hold ``pages`` together with those who do."""
        with self.lock:
            for page in pages:
                self._holders[page] += (sequence,)
            self.shared.update(pages)
            self._assign(sequence, pages)

    def unshare(self, sequence: KVSequence, first: int, stop: int) -> list[tuple[int, int]]:
        """Replace those of pages ``[first, stop)`` of ``sequence`` that others hold too.

        Returns old and new page of each that holds written tokens: their contents are to be copied.
        """
        with self.lock:
            shared = [n for n in range(first, stop) if sequence._pages[n] in self.shared]
            fresh = self._pop(
                len(shared),
                f"{len(shared)} pages that are shared with other sequences are to be written and must be copied",
            )
            pages = list(sequence._pages)
            for number, page in zip(shared, fresh, strict=True):
                self._leave(sequence, pages[number])
                pages[number] = page
                self._holders[page] = (sequence,)
            written = -(-sequence._written // self.page_size)
            copies = [(sequence._pages[n], pages[n]) for n in shared if n < written]
            self.unclean.update(fresh)
            self._assign(sequence, tuple(pages))
        return copies

    def trim(self, sequence: KVSequence, count: int) -> None:
        """Take back what ``sequence`` holds beyond its first ``count`` pages."""
        with self.lock:
            kept, left = sequence._pages[:count], sequence._pages[count:]
            flight = next((each for each in self._flights if sequence in each.sequences), None)
            if left and flight is not None:
                stand_in = KVSequence()
                self.share(stand_in, left)
                flight.left.append(stand_in)
            for page in reversed(left):
                self._leave(sequence, page)
            self._assign(sequence, kept)
            sequence._written = min(sequence._written, len(kept) * self.page_size)
            sequence._cached = min(sequence._cached, sequence._written)

    def restore(self, sequence: KVSequence, pages: tuple[int, ...]) -> None:
        """Undo ``take`` and ``unshare``: have ``sequence`` hold ``pages`` again, which it held before."""
        with self.lock:
            now = sequence._pages
            for page in pages:
                if page not in now:
                    self._holders[page] += (sequence,)
                    self.shared.add(page)
            for page in reversed(now):
                if page not in pages:
                    self._leave(sequence, page)
            self._assign(sequence, pages)

    def reserve(self, pages: Sequence[int]) -> None:
        """Take free ``pages`` out of the pool for the caller."""
        with self.lock:
            free = set(self._free)
            taken = [page for page in pages if page not in free]
            if taken or len(set(pages)) < len(pages):
                raise KVCacheError(
                    f"pages {taken or sorted(pages)} cannot be reserved: each must be free, and named once"
                )
            self.reserved.update(pages)
            self._free = [page for page in self._free if page not in self.reserved]

    def unreserve(self, pages: Sequence[int]) -> None:
        """Put reserved ``pages`` back into the pool."""
        with self.lock:
            strange = [page for page in pages if page not in self.reserved]
            if strange or len(set(pages)) < len(pages):
                raise KVCacheError(
                    f"pages {strange or sorted(pages)} cannot be put back: each must be reserved, and named once"
                )
            self.reserved.difference_update(pages)
            self.unclean.update(pages)
            self._free.extend(reversed(pages))

    def in_flight(self, sequences: Iterable[KVSequence]) -> int | None:
        """Return the number of the first of ``sequences`` that is being prefilled; None when none is."""
        if not self._flights:
            return None
        running = [sequence for flight in self._flights for sequence in flight.sequences]
        return next((n for n, sequence in enumerate(sequences) if sequence in running), None)

    def depart(self, sequences: tuple[KVSequence, ...]) -> Flight:
        """Keep what ``sequences`` give back from others, until ``land``."""
        flight = Flight(sequences)
        self._flights.append(flight)
        return flight

    def land(self, flight: Flight) -> None:
        """End ``flight``: what its sequences gave back is free now, unless others hold it."""
        with self.lock:
            self._flights.remove(flight)
            for stand_in in flight.left:
                self.trim(stand_in, 0)

    def _pop(self, count: int, what: str) -> tuple[int, ...]:
        if count > len(self._free):
            raise KVCacheError(
                f"{what}, {len(self._free)} of {self.num_pages - 1} are free: free a sequence or make the cache larger"
            )
        return tuple([self._free.pop() for _ in range(count)])

    def _leave(self, sequence: KVSequence, page: int) -> None:
        holders = tuple([other for other in self._holders[page] if other is not sequence])
        self.unclean.add(page)
        if holders:
            self._holders[page] = holders
            if len(holders) == 1:
                self.shared.discard(page)
            return
        del self._holders[page]
        self._free.append(page)

    def _assign(self, sequence: KVSequence, pages: tuple[int, ...]) -> None:
        sequence._pages = pages
        sequence._holders = self if pages else None
        self.managed = True
