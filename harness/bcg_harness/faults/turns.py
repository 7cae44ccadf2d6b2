"""Faults in who may call a runner, and in what a runner makes and keeps."""

from bcg_harness.faults.record import Caught, Fault, tests

TURNS = (
    Fault(
        number=40,
        title="a runner is called inside one of its own calls, whose buffers are overwritten",
        caught=Caught.ERROR,
        by="turns",
        how="`RunnerBusyError` names both calls, and the runner works on; another runner may be called there. Without "
        "turns a toy backend that prefills changes the result around it.",
        proofs=tests(
            "core/test_runner_turns.py",
            "test_a_call_in_the_forward_of_a_backend_is_refused_with_both_names",
            "test_a_call_while_a_backend_prepares_a_batch_is_refused",
            "test_a_call_while_a_backend_warms_up_is_refused",
            "test_a_call_in_a_sampler_is_refused",
            "test_a_call_in_a_progress_callback_is_refused",
            "test_a_call_in_a_model_is_refused_at_capture",
            "test_a_backend_that_swallows_the_refusal_spoils_nothing",
            "test_another_runner_may_prefill_in_a_break",
            "test_another_runner_is_refused_at_capture",
            "test_without_turns_a_call_inside_of_another_spoils_it",
        ),
    ),
    Fault(
        number=41,
        title="two threads call one runner at once, and get each other's results",
        caught=Caught.DESIGN,
        by="turns; one order of streams",
        how="A thread waits for its turn, or is refused if the runner was made so, and its stream waits for the last "
        "call's. An interrupt leaves the turn free.",
        proofs=tests(
            "core/test_runner_turns.py",
            "test_two_threads_over_one_runner_get_right_results",
            "test_without_turns_another_thread_spoils_a_call",
            "test_a_capture_waits_for_the_prefill_of_another_thread",
            "test_a_runner_may_refuse_other_threads",
            "test_an_interrupt_while_waiting_leaves_the_turn_free",
            "test_an_interrupt_inside_leaves_the_turn_free",
            "test_an_interrupt_at_the_very_beginning_of_a_turn_leaves_it_free",
            "test_two_streams_over_one_runner_get_right_results",
        )
        + tests(
            "core/test_stream_order.py",
            "test_a_call_waits_for_the_last_one_where_the_stream_is_another",
        ),
    ),
    Fault(
        number=42,
        title="every switch of backends makes and keeps another one, with its workspaces",
        caught=Caught.DESIGN,
        by="kept backends",
        how="The same name with the same options is the same backend, warmed up once. Those used last are kept, others "
        "dropped and counted.",
        proofs=tests(
            "core/test_kept_backends.py",
            "test_switching_to_and_fro_by_name_makes_and_warms_up_each_backend_once",
            "test_a_runner_that_makes_a_backend_at_every_switch_is_found",
            "test_other_options_make_another_backend",
            "test_what_may_have_changed_unseen_makes_another_backend",
            "test_of_many_backends_the_last_used_are_kept_and_the_others_counted",
            "test_the_metadata_of_a_backend_goes_with_it",
        ),
    ),
    Fault(
        number=43,
        title="a bucket, a cache or a long batch beyond the memory ends in a raw allocation error, or ends the process",
        caught=Caught.ERROR,
        by="`BucketError`, `KVCacheError`, `BatchError`",
        how="What is more than the device has is refused before it is asked for, what is more than is free when torch "
        "says so: with the number that fits.",
        proofs=tests(
            "core/test_allocation.py",
            "test_a_bucket_beyond_the_memory_is_refused_with_what_fits",
            "test_a_cache_beyond_the_memory_is_refused_with_what_fits",
            "test_a_batch_beyond_the_buckets_and_the_memory_is_refused_and_the_runner_works_on",
            "test_an_allocation_that_fails_is_the_same_refusal_chained_to_what_was_raised",
            "test_the_workspace_of_a_backend_that_does_not_fit_is_named",
        ),
    ),
    Fault(
        number=44,
        title="a backend whose result has a wrong shape, type or place is found at the first request",
        caught=Caught.ERROR,
        by="warm-up",
        how="It holds results to the contract of every prefill, so capture or switch fails, with backend and layer.",
        proofs=tests(
            "core/test_backend_results.py",
            "test_a_wrong_result_fails_at_capture",
            "test_a_wrong_result_fails_at_a_switch",
            "test_a_result_that_has_to_be_copied_passes_the_warm_up",
        ),
    ),
)
"""Calls of a runner, its threads and its backends."""
