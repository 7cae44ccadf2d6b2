"""Faults between a server's habits and the harness: what is given on a command line, and real traffic."""

from bcg_harness.faults.record import Caught, Fault, tests

SERVING = (
    Fault(
        number=68,
        title="an option on the command line reaches a backend as a string",
        caught=Caught.ERROR,
        by="options typed by the constructor",
        how="Text becomes what the annotation, or the default, of the parameter says, in plug-ins too. What does not "
        "fit is wrong use, with the type and an example.",
        proofs=tests(
            "core/test_text_options.py",
            "test_an_option_is_typed",
            "test_text_that_does_not_fit_is_refused_with_type_and_example",
            "test_options_that_select_takes_are_typed_before_it_is_asked_and_others_after",
        )
        + tests(
            "harness/test_backend_options.py",
            "test_a_command_gives_options_their_types",
            "test_a_value_that_does_not_fit_is_wrong_use_with_an_example",
            "test_the_pytest_plugin_gives_options_their_types",
        ),
    ),
    Fault(
        number=69,
        title="one request of a trace beyond the context refuses all of it, or ended requests keep their pages",
        caught=Caught.DESIGN,
        by="`--longer`, stretches",
        how="Such requests are left out, or cut, and counted. A trace is measured in pieces that share no request, in "
        "the pages of the requests that are there at once, and every piece is checked.",
        proofs=tests(
            "harness/bench/test_trace.py",
            "test_requests_beyond_the_context_are_skipped_and_counted",
            "test_requests_beyond_the_context_are_cut_and_counted",
            "test_an_hour_of_traffic_takes_the_pages_of_the_requests_that_are_there_at_once",
        )
        + tests(
            "harness/bench/test_stretched_bench.py",
            "test_pages_change_hands_between_stretches",
            "test_a_fault_of_a_later_stretch_is_found_in_its_step",
        ),
    ),
)
