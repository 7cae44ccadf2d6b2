"""Faults in who holds a page of the KV cache, and in what it holds."""

from bcg_harness.faults.record import Caught, Fault, tests

PAGES = (
    Fault(
        number=45,
        title="NaN that one request left in its pages reaches their next owner",
        caught=Caught.DESIGN,
        by="cleared tails",
        how="Pages that come back are remembered. For a backend that does not ignore foreign NaN, the slots behind the "
        "last token of each request are zeroed ahead of the forward where such a page is its last.",
        proofs=tests(
            "core/test_kv_nan.py",
            "test_the_next_owner_of_a_page_gets_what_a_fresh_cache_gives",
            "test_without_the_guard_there_is_nan",
            "test_a_backend_that_claims_too_much_gets_nan",
            "test_a_full_graph_finds_clean_pages",
            "test_nan_behind_a_fork_stays_with_its_source",
            "test_what_a_failed_prefill_wrote_is_cleared",
        ),
    ),
    Fault(
        number=46,
        title="a request writes slots that another reads",
        caught=Caught.DESIGN,
        by="counted pages, copy on write",
        how="`PagedKVCache.fork` shares pages. Who is to write one gets a copy of its own first; a batch made before "
        "the page was shared is refused, and so is a raw page table that writes a sequence's page.",
        proofs=tests(
            "core/test_kv_fork.py",
            "test_source_and_fork_go_on_in_one_batch",
            "test_a_source_that_recomputes_leaves_its_fork_alone",
            "test_a_fork_survives_its_source_and_the_next_owner_of_its_pages",
            "test_a_batch_made_before_what_it_writes_was_shared_is_refused",
        )
        + tests(
            "core/test_kv_ownership.py",
            "test_a_raw_write_to_a_page_of_a_sequence_is_refused",
            "test_what_a_request_of_the_batch_writes_another_may_read",
        ),
    ),
    Fault(
        number=47,
        title="pages are used that are free, of another cache, or of somebody else",
        caught=Caught.ERROR,
        by="`KVCacheError`, `BatchError`",
        how="Only a cache fills a sequence, and only for itself. Page tables of the caller's own need reserved pages. "
        "Pages that a sequence gives back during its own prefill go to nobody before that ends.",
        proofs=tests(
            "core/test_kv_ownership.py",
            "test_a_sequence_is_not_made_by_hand",
            "test_a_sequence_of_another_cache_is_refused",
            "test_a_raw_page_that_a_sequence_may_get_is_refused",
            "test_pages_of_a_running_prefill_go_to_nobody_before_it_ends",
            "test_a_runner_that_counts_freed_pages_is_found",
        ),
    ),
    Fault(
        number=48,
        title="more tokens count as cached than were written",
        caught=Caught.ERROR,
        by="`KVCacheError`, `BatchError`",
        how="Only a prefill that ended well, or `PagedKVCache.mark_written`, raises the number. A recomputation lowers "
        "it to its prefix first, and a sequence that changes during its prefill is refused at the end.",
        proofs=tests(
            "core/test_kv_ownership.py",
            "test_what_is_not_written_does_not_count_as_cached",
            "test_a_recomputation_that_fails_leaves_its_prefix",
            "test_a_sequence_that_changes_during_its_prefill_does_not_count",
            "test_a_runner_that_counts_freed_pages_is_found",
        ),
    ),
    Fault(
        number=49,
        title="a batch shares memory with the caller, who changes it after it was checked",
        caught=Caught.DESIGN,
        by="copies",
        how="Whatever a batch is made of is copied, whichever type it has.",
        proofs=tests(
            "core/test_batch_memory.py",
            "test_a_batch_does_not_follow_its_arrays",
            "test_a_batch_of_chunks_does_not_follow_their_tokens",
            "test_a_batch_that_shares_memory_is_found",
        ),
    ),
    Fault(
        number=50,
        title="a refused batch keeps the pages it took",
        caught=Caught.DESIGN,
        by="`PrefillBatch.give_back`",
        how="What `from_chunks` or the runner refuses gives back what it took, unless its sequence has changed since.",
        proofs=tests(
            "core/test_kv_ownership.py",
            "test_a_batch_that_the_runner_refuses_gives_its_pages_back",
            "test_too_many_requests_give_their_pages_back",
            "test_a_refused_batch_leaves_pages_that_the_caller_took",
        )
        + tests(
            "core/test_batch.py",
            "test_chunks_that_fail_late_give_their_pages_back",
            "test_when_pages_run_out_those_that_were_taken_are_given_back",
        ),
    ),
)
