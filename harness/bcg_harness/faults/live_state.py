"""Faults in metadata and other state that changes from batch to batch."""

from bcg_harness.faults.record import Caught, Fault, found, tests

LIVE_STATE = (
    Fault(
        number=14,
        title="attention is part of a segment, so that request boundaries are those of the capture",
        caught=Caught.CHECK,
        by="`structure`, `oracle`; `full_graph`",
        how="A graph must have as many breaks as layers, and a replay attend to each layer once; requests are compared "
        "with references that know their ends, those of full graphs too.",
        proofs=(
            *found(
                "model-attends-in-segment",
                "model-skips-break",
                "model-breaks-twice",
                "model-runs-in-one-break",
                "model-attends-twice",
                "backend-freezes-boundaries",
                "backend-never-refreshes-graph",
            ),
            *tests("core/test_runner_faults.py", "test_request_boundaries_are_those_of_the_batch"),
        ),
    ),
    Fault(
        number=15,
        title="a Python number that a break is given is frozen, so that chunk 2 replays the offset of chunk 1",
        caught=Caught.CHECK,
        by="`bit_equal`, `one_pass`",
        how="Live state is read from a context, passed by identity. Prompts in chunks are compared with one pass.",
        proofs=(
            *found("model-freezes-python-number", "model-keeps-python-state"),
            *found("backend-ignores-prefix"),
            *tests(
                "core/test_runner_faults.py",
                "test_offsets_of_a_second_chunk_are_its_own",
                "test_an_offset_that_is_passed_as_a_number_is_frozen",
            ),
        ),
    ),
    Fault(
        number=16,
        title="rows of a batch with more requests are left in metadata, and corrupt another request",
        caught=Caught.CHECK,
        by="`bit_equal`, `attention`, `oracle`",
        how="Every ladder has a case of many requests followed by few in the same bucket.",
        proofs=(
            *found(
                "backend-keeps-stale-rows",
                "backend-freezes-metadata",
                "backend-freezes-noisily",
            ),
            *tests(
                "core/test_runner_faults.py",
                "test_a_small_batch_after_one_of_many_requests_is_unharmed",
            ),
        ),
    ),
    Fault(
        number=17,
        title="a cache that is keyed by shape gives one batch what was made for another, or is replaced by a capture",
        caught=Caught.CHECK,
        by="`attention`, `oracle`; `bit_equal`",
        how="Same shapes come with other pages and prefixes. What a capture made is poison until a replay computes it.",
        proofs=(
            *found("backend-caches-by-shape", "model-keeps-one-table"),
            *tests(
                "core/test_cpu_engine_replay.py",
                "test_intermediate_tensors_live_as_long_as_the_segment",
            ),
        ),
    ),
    Fault(
        number=18,
        title="buffers of a plan are overwritten while the plan before is still in flight",
        caught=Caught.CHECK,
        by="`interleaved`",
        how="Others are prepared before a batch is attended to, by this instance and by a second one. The FlashInfer "
        "adapter lets two plans take turns, and waits until the copies of the older are done.",
        proofs=(
            *found(
                "backend-keeps-last-plan",
                "backend-keeps-last-plan-noisily",
                "backend-shares-plan-slots",
            ),
            *tests(
                "backends/test_flashinfer.py",
                "test_a_plan_never_overwrites_one_that_the_gpu_has_not_copied",
                "test_without_the_wait_a_plan_is_lost",
            ),
            *tests(
                "backends/test_on_gpu.py", "test_two_batches_may_be_prepared_before_either_runs"
            ),
        ),
    ),
    Fault(
        number=19,
        title="two buckets with as many requests share the state of a plan",
        caught=Caught.CHECK,
        by="`bit_equal`, `attention`, `oracle`",
        how="Metadata is made for each bucket apart. Buckets are replayed in every order, and `bcg fuzz` mixes them.",
        proofs=(
            *found("backend-shares-plans"),
            *tests(
                "core/test_runner_faults.py",
                "test_buckets_with_equally_many_requests_share_no_metadata",
            ),
            *tests("backends/test_varlen.py", "test_buckets_do_not_share_buffers"),
        ),
    ),
    Fault(
        number=20,
        title="a mask or a maximum length of the capture is exceeded later",
        caught=Caught.CHECK,
        by="`attention`, `oracle`",
        how="Cases go on behind long prefixes. A full graph refuses a backend whose limits are below the runner's.",
        proofs=(
            *found("backend-caps-length"),
            *tests(
                "core/test_full_graph.py",
                "test_a_backend_made_for_less_than_batches_may_have_is_refused",
            ),
        ),
    ),
    Fault(
        number=21,
        title="work that a break queues on another stream leaks into a capture, or races the next segment",
        caught=Caught.CHECK,
        by="`attention`, `oracle`",
        how="Inputs come late on purpose, and results are read on the caller's stream, from memory that was NaN. A "
        "capture calls no backend at all, and records what its own thread and stream do.",
        proofs=(
            *found("backend-writes-late"),
            *tests(
                "harness/test_faults.py",
                "test_work_on_a_stream_that_nobody_waits_for_is_found",
                "test_a_stream_that_does_not_wait_for_its_inputs_is_found",
            ),
            *tests(
                "core/test_breaks.py",
                "test_work_that_a_break_leaves_to_another_thread_is_in_no_segment",
            ),
            *tests(
                "core/test_cuda_engine.py",
                "test_work_that_a_break_queues_on_another_stream_is_in_no_segment",
            ),
            *tests("core/test_context.py", "test_attending_without_a_batch_calls_no_backend"),
            *tests(
                "core/test_cuda_engine_logic.py",
                "test_a_break_at_capture_runs_on_the_capture_stream",
            ),
        ),
    ),
)
"""Classes 14 to 21."""
