"""Faults in the registration of plug-ins, and in what tests them."""

from bcg_harness.faults.record import Caught, Fault, tests

REGISTRATION = (
    Fault(
        number=37,
        title="one broken plug-in breaks all, disappears with a warning, or discovery imports everything",
        caught=Caught.ERROR,
        by="`BackendLoadError`, for its own name",
        how="Listing imports nothing. A broken plug-in is an error where it is asked for, and hides no other.",
        proofs=tests(
            "core/test_registry.py",
            "test_a_broken_entry_point_is_an_error_for_its_own_name",
            "test_a_broken_entry_point_is_harmless_to_other_names",
            "test_looking_at_names_loads_nothing",
        )
        + tests("harness/test_candidates.py", "test_a_broken_plug_in_is_an_error_and_hides_nobody")
        + tests(
            "harness/test_cli_check.py",
            "test_a_broken_entry_point_exits_with_1_and_hides_nobody",
        ),
    ),
    Fault(
        number=38,
        title="two plug-ins share a name, options do not reach a plug-in, or a child process does not know it",
        caught=Caught.ERROR,
        by="`DuplicateBackendError`, `BackendOptionError`",
        how="Both distributions are named, options go to the constructor, and entry points are there in every process.",
        proofs=tests(
            "core/test_registry.py",
            "test_two_distributions_with_one_name_are_both_named",
            "test_options_reach_the_constructor",
            "test_an_option_that_is_not_taken_is_named",
            "test_listing_names_in_a_fresh_process_imports_no_backend",
        ),
    ),
    Fault(
        number=39,
        title="a test kit needs files that are not shipped, takes names that others use, or is green with all skipped",
        caught=Caught.ERROR,
        by="exit status; `bcg` in every name",
        how="Options and fixtures carry a prefix, the plug-in imports no torch, and a run without a pass is not green.",
        proofs=tests("harness/test_cli_check.py", "test_an_all_skipped_run_is_not_green")
        + tests(
            "harness/test_pytest_plugin.py",
            "test_options_are_in_the_help_under_their_own_heading",
        )
        + tests(
            "packaging/test_imports.py", "test_importing_the_pytest_plugin_does_not_import_torch"
        )
        + tests("packaging/test_wheel.py", "test_package_has_every_module_of_the_source_tree")
        + tests(
            "harness/conformance/test_outcomes.py", "test_a_run_of_skips_alone_fails_and_says_so"
        ),
    ),
)
"""Classes 37 to 39."""
