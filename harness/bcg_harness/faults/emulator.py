"""Faults that an emulator of CUDA graphs hides where it allows more than CUDA."""

from bcg_harness.faults.record import Caught, Fault, tests

EMULATOR = (
    Fault(
        number=62,
        title="a weight is given other memory after the capture (`w.data = new`, `.half()`, `.to()`, `swap_tensors`), "
        "which an emulator follows and a CUDA graph does not",
        caught=Caught.DESIGN,
        by="operands pinned to their memory",
        how="A segment of the emulator goes on with the memory and geometry of the capture, as on CUDA, so checks find "
        "the difference from eager there too. Memory that was resized or freed is refused before anything runs.",
        proofs=tests(
            "core/test_cpu_engine_memory.py",
            "test_a_model_that_replaces_the_data_of_a_weight_differs_from_eager",
            "test_a_weight_that_is_replaced_is_not_followed",
            "test_a_weight_that_is_updated_in_place_is_followed",
            "test_a_write_goes_to_the_old_memory",
            "test_a_result_that_is_replaced_is_computed_where_it_was",
            "test_memory_that_is_resized_is_refused_before_anything_runs",
        )
        + tests("core/debug/test_pointers.py", "test_a_change_is_refused_by_name"),
    ),
    Fault(
        number=63,
        title="a segment seeds a generator, or draws from one of its own, and replays draw other numbers than eager",
        caught=Caught.ERROR,
        by="`CaptureError`",
        how="Seeding and unknown generators are refused at capture. Engines take `generators=[...]`; breaks may seed "
        "and draw as they like.",
        proofs=tests(
            "core/test_cpu_engine_random.py",
            "test_a_model_with_randomness_that_a_replay_would_lose_is_refused",
            "test_seeding_in_a_segment_is_refused",
            "test_seeding_with_the_seed_that_is_there_is_refused_after_a_draw",
            "test_a_generator_that_the_engine_does_not_know_is_refused",
            "test_a_generator_of_the_engine_is_advanced_by_replays",
            "test_seeding_in_a_break_is_allowed_and_done_at_each_replay",
        ),
    ),
    Fault(
        number=64,
        title="an operation that CUDA refuses in a capture, or records, does the opposite on the emulator",
        caught=Caught.ERROR,
        by="`HostReadError`, `CaptureError`",
        how="One table says what CUDA makes of each operation. The emulator is held to it in CI and CUDA itself on a "
        "GPU; the few operations in which they differ are rows of their own.",
        proofs=tests(
            "core/test_capture_rules.py",
            "test_a_model_that_counts_on_the_host_is_refused",
            "test_the_emulator_refuses_what_reads_on_the_host",
            "test_the_emulator_refuses_what_comes_from_the_host",
            "test_the_emulator_refuses_what_seeds",
            "test_the_emulator_records_what_stays_on_the_device",
            "test_cuda_does_what_the_table_says",
        )
        + tests(
            "core/test_engine.py",
            "test_an_engine_is_not_made_in_a_segment",
            "test_an_engine_is_not_made_in_a_break",
        )
        + tests(
            "llama/test_emulated_transformers.py",
            "test_a_model_is_captured_and_replays_with_the_bits_of_eager",
        ),
    ),
)
"""What the emulator might let pass."""
