"""Faults that come from what the caller has switched on in torch."""

from bcg_harness.faults.record import Caught, Fault, tests

_EVERY_CALL = "test_a_call_has_the_bits_of_one_in_a_clean_state"

AMBIENT = (
    Fault(
        number=56,
        title="a capture or a prefill runs under the caller's autocast, and is recorded or replayed in another type",
        caught=Caught.DESIGN,
        by="a clean state inside every call",
        how="Autocast is put aside for the call, and back on for `sample`. Bare graphs replay, breaks included, in the "
        "state of their capture, and a capture neither uses nor leaves casts that autocast remembers.",
        proofs=tests(
            "core/test_ambient.py",
            *(
                f"{_EVERY_CALL}[autocast_bfloat16-{call}]"
                for call in ("capture", "replay", "eager", "padded_eager")
            ),
            "test_sample_sees_the_state_of_the_caller",
            "test_a_bare_graph_replays_outside_as_it_was_captured_inside[autocast_bfloat16]",
            "test_a_bare_graph_replays_inside_as_it_was_captured_outside[autocast_bfloat16]",
            "test_a_break_in_a_state_of_the_model_replays_in_it",
            "test_a_cast_that_was_remembered_before_a_capture_is_no_part_of_it",
            "test_a_cast_that_was_captured_is_not_remembered_after_it",
        )
        + tests(
            "core/test_ambient_on_gpu.py",
            "test_a_prefill_has_the_bits_of_one_in_a_clean_state",
            "test_a_capture_records_what_one_in_a_clean_state_does",
            "test_a_cast_of_a_capture_is_neither_older_nor_younger_than_the_capture",
        ),
    ),
    Fault(
        number=57,
        title="the caller's default device or type reaches index arrays, tables, weights, or what a backend makes",
        caught=Caught.DESIGN,
        by="named devices and types; a clean state inside every call",
        how="What is made here names both. Models and backends that leave them out find a CPU and float32, at every "
        "call. What is made in inference mode can be written outside of it.",
        proofs=tests(
            "core/test_ambient.py",
            *(
                f"{_EVERY_CALL}[{state}-{call}]"
                for state in ("set_default_device", "default_float64")
                for call in ("from_chunks", "backend", "capture", "replay", "eager")
            ),
            f"{_EVERY_CALL}[inference_mode-kv_cache]",
            "test_backend_and_model_see_a_clean_state",
            "test_the_state_of_the_caller_is_what_it_was",
            "test_a_model_that_was_made_under_a_default_of_float64_is_named_by_torch_and_bucket",
        )
        + tests(
            "llama/test_ambient.py",
            "test_random_weights_are_those_of_a_clean_state",
            "test_loaded_weights_are_those_of_a_clean_state",
            "test_rope_tables_say_themselves_where_and_what_they_are",
        )
        + tests(
            "backends/test_varlen.py",
            "test_index_arrays_do_not_depend_on_the_defaults_of_the_caller",
        )
        + tests(
            "backends/test_flashinfer.py",
            "test_arrays_of_a_plan_do_not_depend_on_the_defaults_of_the_caller",
        ),
    ),
    Fault(
        number=58,
        title="a mode of the caller (FLOP counter, other dispatch or function modes, torch.compile) sees a capture, or "
        "changes what it records; kernels keep a precision that the caller has changed since",
        caught=Caught.ERROR,
        by="`AmbientStateError`",
        how="Modes are refused by name, before anything is made or launched; `torch.compile` around the caller finds "
        "nothing to compile; a replay under another precision of products than at capture is refused.",
        proofs=tests(
            "core/test_ambient.py",
            "test_a_call_under_a_mode_of_the_caller_is_refused_by_name",
            "test_a_refused_prefill_leaves_the_runner_and_the_batch_as_they_were",
            "test_a_bare_capture_under_a_mode_of_the_caller_is_refused_by_name",
            "test_a_bare_replay_under_a_mode_of_the_caller_is_refused_by_name",
            "test_a_bare_capture_inside_a_compiled_function_is_refused",
            f"{_EVERY_CALL}[torch_compile-capture]",
            f"{_EVERY_CALL}[torch_compile-replay]",
            "test_what_a_model_compiles_stays_compiled_below_a_compiled_caller",
            "test_a_replay_under_another_precision_than_at_capture_is_refused",
        )
        + tests(
            "llama/test_ambient.py",
            "test_making_a_model_under_a_mode_of_the_caller_is_refused_by_name",
        )
        + tests(
            "backends/test_sdpa.py",
            "test_the_kernel_is_not_the_one_that_the_caller_allows",
        )
        + tests(
            "core/test_ambient_on_gpu.py",
            "test_deterministic_algorithms_change_no_bits",
            "test_a_replay_under_another_precision_than_at_capture_is_refused",
        ),
    ),
)
