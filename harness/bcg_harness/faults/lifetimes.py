"""Faults in the lifetime of memory across a break."""

from bcg_harness.faults.record import Caught, Fault, found, tests

LIFETIMES = (
    Fault(
        number=1,
        title="an argument of a break is freed, and its memory given to a bucket that is captured later",
        caught=Caught.DESIGN,
        by="breaks own their arguments",
        how="A graph holds every tensor in the arguments of its breaks, nested ones too, for as long as it lives.",
        proofs=(
            *tests(
                "core/test_break_lifetimes.py",
                "test_an_argument_survives_later_captures_and_allocations",
                "test_a_tensor_argument_is_held_by_its_break",
                "test_a_tensor_nested_in_an_argument_is_held_by_its_break",
            ),
            *tests(
                "core/test_cuda_engine.py",
                "test_an_argument_survives_a_later_capture_in_the_pool",
            ),
        ),
    ),
    Fault(
        number=2,
        title="a tensor that a break returns is freed, and the next segment reads its old address",
        caught=Caught.DESIGN,
        by="results keep the address of the capture",
        how="The graph holds the captured result, and copies what a replay returns to that address.",
        proofs=(
            *tests(
                "core/test_break_lifetimes.py",
                "test_a_tensor_returned_by_a_break_is_held_and_keeps_its_address",
                "test_a_view_returned_by_a_break_is_held_with_its_base",
            ),
            *tests(
                "core/test_break_outputs.py", "test_a_new_tensor_is_copied_to_the_captured_address"
            ),
            *tests(
                "core/test_cuda_engine.py",
                "test_a_result_of_a_break_is_copied_to_its_captured_address",
            ),
        ),
    ),
    Fault(
        number=3,
        title="a break leaves a tensor in an attribute or a list, where a later segment reads it",
        caught=Caught.CHECK,
        by="`bit_equal`; `HiddenOutputError` with `--debug`",
        how="Eager execution reads the new tensor and a replay the old one. What a break returns is passed on rightly.",
        proofs=(
            *found("model-leaves-side-channel"),
            *tests(
                "core/test_break_lifetimes.py",
                "test_a_side_channel_shows_as_a_difference_from_eager",
                "test_a_side_channel_that_is_returned_instead_agrees_with_eager",
            ),
            *tests(
                "core/debug/test_hidden_outputs.py",
                "test_a_side_channel_is_refused_with_break_and_operation",
            ),
        ),
    ),
    Fault(
        number=4,
        title="tensors that only the capture needed are freed, although their addresses are recorded",
        caught=Caught.DESIGN,
        by="one workspace a runner",
        how="Inputs, boundary rows and results are fixed memory that the runner owns; captures run on the same.",
        proofs=tests(
            "core/test_runner_faults.py",
            "test_addresses_recorded_at_capture_are_held_by_the_runner",
        )
        + tests(
            "core/test_cuda_engine.py",
            "test_addresses_recorded_at_capture_are_held_by_the_runner",
        )
        + tests("core/test_context.py", "test_static_inputs_have_one_address_for_each_size")
        + tests("core/test_cpu_engine_replay.py", "test_an_input_is_held_by_the_segment"),
    ),
    Fault(
        number=5,
        title="every segment has a memory pool or every bucket a stream of its own, so that memory adds up",
        caught=Caught.DESIGN,
        by="one pool and one stream an engine",
        how="All segments of all buckets share both, and buckets are captured from the largest down.",
        proofs=tests(
            "core/test_cuda_engine_logic.py",
            "test_all_segments_of_all_graphs_share_one_pool",
            "test_segments_are_captured_on_the_capture_stream_after_a_synchronisation",
        )
        + tests(
            "core/test_cuda_engine.py",
            "test_breaks_cost_no_memory",
            "test_buckets_cost_the_memory_of_the_largest",
        )
        + tests("core/test_runner.py", "test_a_report_describes_every_bucket_from_the_largest"),
    ),
    Fault(
        number=6,
        title="breaks keep every layer's q, k, v and output alive",
        caught=Caught.DESIGN,
        by="boundary buffers",
        how="All layers of all buckets share one set of rows; a break's arguments are the context and a layer number.",
        proofs=tests(
            "core/test_runner_faults.py",
            "test_breaks_hold_no_tensors_of_their_own",
            "test_boundary_memory_does_not_depend_on_layers_and_buckets",
        ),
    ),
    Fault(
        number=7,
        title="a weight or buffer is replaced after the capture, and replays go on with the old one",
        caught=Caught.CHECK,
        by="`bit_equal`, `raw_shape`; `StaleTensorError` with `--debug`",
        how="Eager execution reads the new weight and a replay the old one. Updates in place reach both.",
        proofs=(
            *found("runner-replaces-weights"),
            *tests(
                "core/test_runner_faults.py",
                "test_a_weight_that_is_replaced_shows_as_a_difference_from_eager",
                "test_a_weight_that_is_updated_in_place_is_seen_by_replays",
            ),
            *tests("core/debug/test_pointers.py", "test_a_change_is_refused_by_name"),
        ),
    ),
)
"""Classes 1 to 7."""
