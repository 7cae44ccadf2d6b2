"""Faults of engines that share a process, and the GPU, with each other and with a server."""

from bcg_harness.faults.record import Caught, Fault, tests

ENGINES = (
    Fault(
        number=65,
        title="an engine is made or a capture started inside another capture, or two threads capture at once",
        caught=Caught.ERROR,
        by="`NestedCaptureError`; captures take turns",
        how="Whoever captures, this library or torch, is seen. Captures of a process wait for each other, and other "
        "threads may allocate and wait meanwhile.",
        proofs=tests(
            "core/test_cuda_engine_logic.py",
            "test_an_engine_is_not_made_while_somebody_captures",
            "test_a_capture_is_not_started_inside_that_of_somebody_else",
            "test_a_capture_waits_for_that_of_another_thread",
        )
        + tests(
            "core/test_cuda_engines_together.py",
            "test_an_engine_made_in_a_segment_is_refused_by_name",
            "test_a_capture_inside_one_of_torch_is_refused_by_name",
            "test_threads_make_engines_and_capture_one_after_the_other",
            "test_captures_go_on_while_another_thread_allocates_and_waits",
        )
        + tests("core/test_capture_state.py", "test_no_engine_is_made_inside_a_capture"),
    ),
    Fault(
        number=66,
        title="a side stream is open at the end of a segment, or a segment waits for a stream outside of it",
        caught=Caught.ERROR,
        by="torch's error, with a note",
        how="The note names the stream and the way out, and so it does for host reads and unknown generators.",
        proofs=tests(
            "core/test_capture_advice.py",
            "test_an_error_of_a_capture_comes_with_a_way_out",
            "test_the_stream_that_was_waited_for_is_named",
        )
        + tests(
            "core/test_cuda_engines_together.py",
            "test_a_side_stream_that_is_open_at_the_end_of_a_segment_is_named",
            "test_a_side_stream_that_is_open_at_a_break_is_named",
            "test_a_wait_for_a_stream_outside_of_the_capture_is_named",
        ),
    ),
    Fault(
        number=67,
        title="engines that are dropped leave workspaces and pools, and broken captures pointers to freed graphs",
        caught=Caught.DESIGN,
        by="shared streams; broken graphs are kept",
        how="One workspace a device lives as long as the process. What torch cannot end is kept and counted, and its "
        "pool given back.",
        proofs=tests(
            "core/test_cuda_engine_logic.py",
            "test_the_workspaces_of_all_engines_lie_in_one_pool",
            "test_a_graph_that_could_not_be_ended_is_kept_and_counted",
        )
        + tests(
            "core/test_cuda_engines_together.py",
            "test_engines_that_are_dropped_leave_nothing",
            "test_workspaces_of_a_dropped_engine_are_not_those_of_another",
            "test_a_process_full_of_engines_captures_and_aborts_stays_flat",
        ),
    ),
)
"""Engines beside each other."""
