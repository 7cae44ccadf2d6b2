"""Which built-in cases there are, and in which order they are run."""

from collections.abc import Sequence

from bcg_harness.builtin import fresh, prefixed
from bcg_harness.builtin.sizes import Sizes
from bcg_harness.cases import Case


def builtin_cases(
    buckets: Sequence[int], *, page_size: int = 16, max_context: int = 2048
) -> list[Case]:
    """Return the built-in cases for these captured token counts, in the order in which they are run.

    Their names, and which checks can judge them, depend on ``buckets`` alone. Requests that would be longer than
    ``max_context`` are split into several where that leaves the case what it is; a page may be so large that a case
    needs more all the same.
    """
    sizes = Sizes(buckets=tuple(sorted(buckets)), page_size=page_size, max_context=max_context)
    return [
        fresh.one_request(sizes),
        fresh.two_requests(sizes),
        fresh.other_boundaries(sizes),
        fresh.around(sizes, "bucket-minus-1", -1),
        fresh.around(sizes, "bucket", 0),
        fresh.around(sizes, "bucket-plus-1", 1),
        prefixed.edges_mixed(sizes),
        prefixed.edges_of_prefixed(sizes),
        fresh.one_token(sizes),
        fresh.one_token_requests(sizes),
        fresh.above_largest(sizes),
        prefixed.cached_prefixes(sizes),
        prefixed.many(sizes),
        prefixed.decode_rows(sizes),
        prefixed.page_edges(sizes),
        prefixed.to_the_limit(sizes),
        prefixed.chunks(sizes, "two-chunks", (127, 73)),
        prefixed.chunks(sizes, "five-chunks", (64, 63, 1, 16, 56)),
        fresh.large_then_small(sizes),
        fresh.bucket_order(sizes),
        fresh.no_requests(sizes),
    ]
