"""Faults in capture, errors and dispatch."""

from bcg_harness.faults.record import Caught, Fault, found, tests

CAPTURE = (
    Fault(
        number=22,
        title="an exception during a capture is hidden by another, leaves hooks behind, or a half-built graph",
        caught=Caught.ERROR,
        by="transactional capture",
        how="It arrives as it was raised, with a note of the place. Nothing is published, and the next capture works.",
        proofs=tests(
            "core/test_capture_errors.py",
            "test_an_exception_reaches_the_caller_as_it_was_raised",
            "test_a_failed_capture_publishes_nothing",
            "test_a_failed_capture_object_keeps_no_half_built_segments",
            "test_after_a_failed_capture_no_recorder_is_active",
            "test_after_a_failed_capture_the_same_graph_can_be_captured",
            "test_an_engine_that_fails_is_aborted_and_usable_again",
        )
        + tests(
            "core/test_cuda_engine.py",
            "test_an_exception_arrives_as_raised_and_everything_works_afterwards",
        )
        + tests(
            "core/test_runner_state_machine.py",
            "test_a_runner_stays_right_whatever_is_done_to_it",
        ),
    ),
    Fault(
        number=23,
        title="a break inside of a break crashes",
        caught=Caught.DESIGN,
        by="inner breaks run inline",
        how="The outer break is recorded, and the inner one is a plain call within it.",
        proofs=tests("core/test_breaks.py", "test_a_break_nested_in_a_break_runs_inline")
        + tests(
            "core/test_runner_faults.py",
            "test_attention_called_from_within_a_break_runs_inline",
        ),
    ),
    Fault(
        number=24,
        title="a kernel is compiled or memory allocated for the first time inside of a capture, or while serving",
        caught=Caught.DESIGN,
        by="warm-up; attention outside of segments",
        how="Model and backend run at the size of every bucket first. In a break, allocating and waiting harm nothing; "
        "`bcg bench` shows what they cost.",
        proofs=tests(
            "core/test_runner_backends.py",
            "test_warm_up_runs_a_backend_at_the_size_of_each_bucket",
            "test_a_backend_that_skips_its_warm_up_is_lazy_at_the_first_replay_and_in_no_capture",
        )
        + tests(
            "core/test_runner.py",
            "test_warm_up_comes_before_every_capture",
            "test_what_a_model_makes_at_its_first_call_is_made_in_warm_up",
        )
        + tests(
            "harness/test_faults.py",
            "test_what_does_no_harm_is_no_fault[warms-up-late]",
            "test_what_does_no_harm_is_no_fault[allocates-at-replay]",
            "test_what_does_no_harm_is_no_fault[reads-on-host]",
        )
        + tests(
            "harness/bench/test_bench.py",
            "test_lost_host_time_shows_in_the_modes_that_call_the_backend_and_only_there",
        ),
    ),
    Fault(
        number=25,
        title="everything runs eagerly, and nobody notices",
        caught=Caught.CHECK,
        by="`structure`",
        how="Replays and fallbacks are counted with their reasons, rightly, every bucket must be captured, and the "
        "model's Python must not run at a replay.",
        proofs=(
            *found(
                "runner-falls-back-silently",
                "runner-pretends-to-replay",
                "engine-runs-python-again",
                "model-runs-in-one-break",
                "runner-drops-bucket",
                "runner-counts-twice",
                "runner-counts-no-reason",
                "runner-gives-no-reason",
            ),
            *tests("core/test_runner_faults.py", "test_every_prefill_is_counted_exactly_once"),
        ),
    ),
    Fault(
        number=26,
        title="running out of memory while capturing ends the process, or graphs take the memory of the KV cache",
        caught=Caught.ERROR,
        by="buckets fail one by one",
        how="The cache is there before, and no capture touches it. A bucket without memory is left out and reported; "
        "its batches go elsewhere. What each bucket takes and serves is counted, and `bcg tune` keeps a budget.",
        proofs=tests(
            "core/test_runner_errors.py",
            "test_a_bucket_that_runs_out_of_memory_is_left_out_and_reported",
            "test_batches_of_a_missing_bucket_go_to_a_larger_one",
            "test_an_engine_that_runs_out_of_memory_loses_that_bucket_alone",
            "test_a_capture_that_runs_out_of_memory_takes_nothing_from_the_kv_cache",
        )
        + tests(
            "core/test_runner.py",
            "test_replays_are_counted_by_bucket",
            "test_capture_leaves_the_cache_as_it_was_but_for_the_reserved_page",
            "test_capture_takes_no_pages",
        )
        + tests(
            "core/test_capture_memory.py",
            "test_an_engine_is_asked_for_its_memory_once_a_bucket",
        ),
    ),
    Fault(
        number=27,
        title="a batch without tokens or requests makes a planner divide by zero",
        caught=Caught.DESIGN,
        by="nobody is asked",
        how="Such a batch is valid, has an empty result, and reaches no backend; `structure` fails where it does.",
        proofs=(
            *found("runner-plans-for-nobody"),
            *tests(
                "harness/test_faults.py",
                "test_what_does_no_harm_is_no_fault[divides-by-requests]",
                "test_a_runner_that_plans_for_nobody_ends_a_backend_that_divides_by_requests",
            ),
            *tests("core/test_runner.py", "test_a_batch_without_requests_reaches_no_backend"),
        ),
    ),
    Fault(
        number=28,
        title="results depend on who shares the batch, which hides differences or fakes them",
        caught=Caught.CHECK,
        by="`bit_equal`; `attention`, `oracle`",
        how="Bits are compared with the same batch at the same shape alone; everything else within a budget.",
        proofs=(
            *found("backend-errs-in-company", "backend-noisy"),
            *tests(
                "harness/test_faults.py",
                "test_what_does_no_harm_is_no_fault[splits-by-composition]",
                "test_declared_noise_is_held_to_a_budget",
            ),
            *tests(
                "backends/test_flash_attn.py",
                "test_everything_else_is_off_and_keys_are_not_split",
            ),
        ),
    ),
)
"""Classes 22 to 28."""
