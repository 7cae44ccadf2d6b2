"""Faults in what crosses a break, and in who is inside a capture."""

from bcg_harness.faults.record import Caught, Fault, tests

BREAKS = (
    Fault(
        number=51,
        title="a list or dict that a break was given is changed after the call, so that a replay sees both",
        caught=Caught.DESIGN,
        by="containers are made anew",
        how="Lists, tuples and dicts are as they were at capture, and a break that changes one is refused. Live state "
        "is an object, passed by identity.",
        proofs=tests(
            "core/test_break_arguments.py",
            "test_a_list_that_grows_after_the_call_does_not_grow_for_the_break",
            "test_a_container_is_as_it_was_at_capture",
            "test_a_break_that_changes_a_container_is_refused_at_capture",
            "test_an_object_is_passed_by_identity",
            "test_other_objects_are_passed_by_identity",
            "test_without_rebuilding_a_break_sees_what_was_changed_later",
        ),
    ),
    Fault(
        number=52,
        title="a break returns what cannot be put back: an object, an expanded or conjugate tensor, two that overlap",
        caught=Caught.ERROR,
        by="`BreakOutputError`",
        how="Refused at capture by the name of the break. Dataclasses are taken apart, and NaN is NaN.",
        proofs=tests(
            "core/test_break_results_refused.py",
            "test_what_cannot_be_put_back_is_refused_at_capture",
            "test_another_kind_of_result_at_replay_is_refused_in_a_sentence",
            "test_a_conjugate_view_of_captured_memory_is_another_value",
            "test_a_container_that_the_break_keeps_and_changes_is_refused",
            "test_without_a_refusal_an_object_goes_stale",
        ),
    ),
    Fault(
        number=53,
        title='a copied context, or an interrupt in the clean-up, leaves everything "inside a capture"',
        caught=Caught.DESIGN,
        by="the capture is the thread's",
        how="Contexts carry no capture, and every step of the clean-up runs, whatever the one before it raised.",
        proofs=tests(
            "core/test_capture_state.py",
            "test_a_context_that_was_copied_in_a_break_is_outside_afterwards",
            "test_a_task_that_a_break_started_captures_and_replays_later",
            "test_another_thread_with_a_copied_context_records_nothing",
            "test_an_interrupt_in_the_clean_up_leaves_nobody_inside",
        )
        + tests(
            "core/test_capture_interrupts.py",
            "test_an_interrupt_of_any_call_of_the_clean_up_leaves_the_capture",
            "test_an_interrupt_of_an_engine_leaves_the_capture",
            "test_by_a_context_variable_a_copied_context_is_inside_for_ever",
        ),
    ),
    Fault(
        number=54,
        title="an error cannot be pickled, so that a worker's failure loses its reason",
        caught=Caught.DESIGN,
        by="errors travel",
        how="Every public error keeps its arguments, attributes, notes and cause in another process.",
        proofs=tests(
            "core/test_errors_travel.py",
            "test_an_error_arrives_as_it_was",
            "test_an_error_of_a_worker_reaches_the_caller",
        ),
    ),
    Fault(
        number=55,
        title="a graph is replayed inside itself, inside a segment, or beside another in the same memory",
        caught=Caught.ERROR,
        by="`NestedCaptureError`",
        how="An engine serves one capture or replay at a time. A graph of another engine may be replayed in a break.",
        proofs=tests(
            "core/test_capture_errors.py",
            "test_a_graph_is_not_replayed_in_itself",
            "test_a_replay_inside_of_a_capture_is_refused",
            "test_a_graph_of_the_same_engine_is_not_replayed_in_a_break_at_capture",
            "test_a_graph_of_the_same_engine_is_not_replayed_in_a_break_at_replay",
            "test_a_graph_is_replayed_in_a_break_at_capture_and_at_replay",
            "test_a_graph_of_an_engine_that_is_watched_is_of_the_same_engine",
            "test_without_knowing_its_use_a_graph_is_replayed_inside_of_itself",
        ),
    ),
)
"""Breaks and captures."""
