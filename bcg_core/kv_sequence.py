"""One request's place in a KV cache."""

from operator import index
from typing import TYPE_CHECKING, NoReturn

from bcg_core.errors import KVCacheError

if TYPE_CHECKING:
    from bcg_core.page_holders import PageHolders


class KVSequence:
    """Name the pages of one request across prefill chunks; only a KV cache fills it.

    A new one is empty and belongs to no cache. The first pages it gets tie it to theirs, and ``PagedKVCache.free``
    unties it. Compared by identity, and not to be copied: two handles would hold one request's pages.
    """

    __slots__ = ("_cached", "_holders", "_pages", "_written")

    def __init__(self, **claims: object) -> None:
        if claims:
            raise KVCacheError(
                f"KVSequence() takes no {', '.join(claims)}: what a sequence holds is its cache's to say. "
                "PagedKVCache.fork(sequence, tokens) shares cached tokens, extend and mark_written are for tokens that "
                "the caller wrote, reserve is for page tables of the caller's own"
            )
        self._pages: tuple[int, ...] = ()
        self._cached = 0
        self._written = 0
        self._holders: PageHolders | None = None

    @property
    def pages(self) -> tuple[int, ...]:
        """Return the page numbers in order; token t lives in page ``pages[t // S]``."""
        return self._pages

    @property
    def cached(self) -> int:
        """Return how many tokens count as cached: what a prefill goes on behind.

        May be lowered, to go on from an earlier token, and raised again to what is still written. Only a prefill, or
        ``PagedKVCache.mark_written``, makes that more.
        """
        return self._cached

    @cached.setter
    def cached(self, tokens: int) -> None:
        tokens = index(tokens)
        if not 0 <= tokens <= self._written:
            raise KVCacheError(
                f"{tokens} tokens cannot count as cached, {self._written} are written: prefill the others, or call "
                "PagedKVCache.mark_written after writing them to the sequence's pages"
            )
        self._cached = tokens

    def __repr__(self) -> str:
        return f"<KVSequence of {self._cached} cached tokens in {len(self._pages)} pages>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise KVCacheError(
            "a KVSequence cannot be copied or pickled, as its pages are held by itself alone: share them with "
            "PagedKVCache.fork"
        )
