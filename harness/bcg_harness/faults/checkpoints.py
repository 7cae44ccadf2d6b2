"""Faults in checkpoints: files, settings and names that do not mean what a loader takes them for."""

from bcg_harness.faults.record import Caught, Fault, tests

CHECKPOINTS = (
    Fault(
        number=59,
        title="an outdated copy of a tensor in another shard wins over the one that the index names",
        caught=Caught.DESIGN,
        by="the index",
        how="A tensor is read from the file that the index names, and copies elsewhere are named in a warning. A "
        "tensor that its file lacks is refused with the files that hold it.",
        proofs=tests(
            "llama/test_load_shards.py",
            "test_an_outdated_copy_in_another_shard_does_not_count",
            "test_an_outdated_copy_of_another_shape_does_not_count",
            "test_a_tensor_that_its_file_lacks_is_named_with_both_files",
            "test_a_tensor_that_no_file_holds_is_named",
            "test_a_needed_tensor_in_no_index_is_named_with_its_file",
            "test_a_spare_tensor_in_no_index_is_left_out_with_a_warning",
            "test_one_file_beside_shards_is_what_is_read",
        ),
    ),
    Fault(
        number=60,
        title="a key of the configuration or of a GGUF header that changes the result is overlooked",
        caught=Caught.ERROR,
        by="`CheckpointError`, `CheckpointWarning`",
        how="What can be served is read: RoPE factors without a type, under their old key, with an attention factor. "
        "Other known keys are refused unless they change nothing; unknown ones that sound as if they did are named.",
        proofs=tests(
            "llama/test_config_keys.py",
            "test_a_key_that_changes_results_is_refused_by_name",
            "test_a_key_at_a_harmless_value_is_served",
            "test_every_refused_key_is_tried",
            "test_a_mistral_that_calls_itself_a_llama_is_refused_for_its_window",
            "test_a_window_would_have_changed_the_logits",
            "test_a_rope_that_would_be_overlooked_is_refused",
            "test_a_rope_in_the_spelling_of_transformers_4_has_its_logits",
            "test_unknown_keys_that_sound_as_if_they_mattered",
            "test_a_warning_names_unknown_keys_and_says_what_to_do",
        )
        + tests(
            "llama/test_gguf_header.py",
            "test_rope_is_what_llama_cpp_reads",
            "test_a_scaled_rope_has_the_logits_of_transformers",
            "test_a_field_that_changes_results_is_refused_by_name",
            "test_a_field_at_a_harmless_value_is_served",
            "test_a_file_is_refused_before_it_is_de_quantised",
            "test_a_warning_names_fields_that_nothing_reads",
        ),
    ),
    Fault(
        number=61,
        title="a checkpoint under other names, tied the other way round, or split is refused without a word of what "
        "was found, or completed with random weights",
        caught=Caught.ERROR,
        by="`CheckpointError`",
        how="What transformers loads is loaded with its logits. What it would make up is refused with the names that "
        "were found, the wrapper they come from, and how to save or merge the whole.",
        proofs=tests(
            "llama/test_load_names.py",
            "test_what_transformers_loads_is_loaded_with_its_logits",
            "test_what_transformers_would_make_up_is_refused_with_what_was_found",
            "test_an_error_about_hundreds_of_names_stays_short",
            "test_two_tensors_that_mean_one_are_refused",
        )
        + tests(
            "llama/test_gguf_header.py",
            "test_a_part_of_a_split_file_is_refused_with_the_command_that_merges",
            "test_missing_parts_are_named",
            "test_a_part_under_another_name_is_known_by_its_header",
            "test_transformers_makes_up_the_tensors_of_the_other_parts",
        ),
    ),
)
