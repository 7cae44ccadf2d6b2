"""Faults that lie in wait in the libraries that adapters call."""

from bcg_harness.faults.record import Caught, Fault, found, tests

LIBRARIES = (
    Fault(
        number=29,
        title="64-bit indices are misread without notice; a last page of length 0 loses a page",
        caught=Caught.ERROR,
        by="`BatchError`; `attention`",
        how="A batch refuses indices of another type; device copies are int32. Cases end with pages full and not.",
        proofs=(
            *tests(
                "core/test_batch.py",
                "test_index_arrays_of_another_type_are_refused_by_name",
                "test_device_indices_are_contiguous_int32",
            ),
            *tests(
                "backends/test_flashinfer.py",
                "test_arrays_of_a_plan_are_int32_and_contiguous",
                "test_the_last_page_of_a_request_is_never_empty",
            ),
            *found("backend-drops-full-last-page"),
        ),
    ),
    Fault(
        number=30,
        title="a plan defaults to float16, strides of `out` are ignored, or rows beyond the plan are written",
        caught=Caught.CHECK,
        by="`padding`, `attention`",
        how="`out` is contiguous, plans name their types, and rows beyond the batch must stay as they are.",
        proofs=(
            *found(
                "backend-writes-row-r",
                "backend-writes-row-r-of-a-full-bucket",
                "backend-leaves-out-unwritten",
                "backend-returns-heads-first",
                "backend-ignores-out",
            ),
            *tests("core/test_context.py", "test_output_heads_are_a_contiguous_view"),
            *tests(
                "backends/test_flashinfer.py",
                "test_a_plan_names_scale_and_dtypes_of_the_spec",
            ),
            *tests(
                "harness/test_faults.py",
                "test_what_does_no_harm_is_no_fault[returns-new-tensor]",
                "test_what_does_no_harm_is_no_fault[returns-offset-view]",
                "test_what_does_no_harm_is_no_fault[returns-strided]",
                "test_an_output_that_breaks_the_contract_is_an_error_that_names_both",
            ),
        ),
    ),
    Fault(
        number=31,
        title="told of a longest request of one token, FlashAttention 2 leaves `out` unwritten or crashes",
        caught=Caught.DESIGN,
        by="never told of fewer than two",
        how="The adapter tells a larger bound. Output memory is NaN, so that what is not written fails in `attention`.",
        proofs=(
            *tests(
                "backends/test_flash_attn.py",
                "test_version_2_is_never_told_of_a_single_new_token",
                "test_the_stand_in_for_2_leaves_out_unwritten_when_told_of_one_token",
            ),
            *tests(
                "backends/test_torch_varlen.py",
                "test_the_kernel_is_never_told_of_a_longest_request_below_2",
            ),
            *found("backend-leaves-out-unwritten"),
        ),
    ),
    Fault(
        number=32,
        title="a maximum length that is too small drops keys or leaves rows unwritten, without notice",
        caught=Caught.CHECK,
        by="`attention`, `oracle`",
        how="Lengths come from the live batch on the host; in full graphs they are bounds that no batch exceeds.",
        proofs=(
            *found("backend-caps-length"),
            *tests(
                "backends/test_varlen.py",
                "test_lengths_that_launches_take_are_integers_of_the_host",
                "test_lengths_of_a_full_graph_are_bounds",
            ),
            *tests("backends/test_flash_attn.py", "test_version_4_is_told_of_lengths_as_they_are"),
        ),
    ),
    Fault(
        number=33,
        title="a causal mask is aligned top-left, which is wrong behind a prefix",
        caught=Caught.CHECK,
        by="`attention`, `oracle`, `one_pass`",
        how="Cases have prefixes of many lengths, and the oracle aligns bottom-right by definition.",
        proofs=(
            *found("backend-aligns-top-left"),
            *tests(
                "backends/test_sdpa.py",
                "test_behind_a_prefix_the_mask_is_aligned_bottom_right",
            ),
            *tests(
                "backends/test_xformers.py",
                "test_a_mask_is_made_from_the_lengths_of_the_batch",
            ),
        ),
    ),
    Fault(
        number=34,
        title="a single KV head is broadcast without grouped heads being asked for, or heads are grouped otherwise",
        caught=Caught.CHECK,
        by="`attention`, `oracle`",
        how="Tiny models have equal, grouped, single and odd numbers of heads; `gqa` must be declared.",
        proofs=(
            *found("backend-interleaves-heads"),
            *tests(
                "backends/test_sdpa.py",
                "test_query_heads_read_the_kv_head_of_their_group",
                "test_head_layouts_are_within_budget_of_float64",
            ),
            *tests("llama/test_presets.py", "test_tiny_presets_cover_head_groups"),
        ),
    ),
    Fault(
        number=35,
        title="torch takes cuDNN for attention, which plans anew for every new length",
        caught=Caught.DESIGN,
        by="the kernel is pinned",
        how="On CUDA the adapter allows the flash kernel alone, or the memory-efficient one for float32.",
        proofs=tests("backends/test_sdpa.py", "test_on_cuda_the_kernel_is_pinned_and_is_not_cudnn"),
    ),
    Fault(
        number=36,
        title="work goes to the current device where the tensors are on another",
        caught=Caught.ERROR,
        by="`BackendContractError`, `KVCacheError`, `ValueError`",
        how="Runners make their cache's device the current one, bare graphs their engine's. Caches, engines and "
        "results of another are refused.",
        proofs=(
            *tests(
                "core/test_current_device.py",
                "test_the_caches_device_is_current_in",
                "test_after_an_exception_the_callers_device_is_current",
                "test_an_engine_of_another_device_is_refused_with_both",
            ),
            *tests(
                "core/test_cuda_engine_logic.py",
                "test_an_index_is_kept",
                "test_a_break_at_replay_sees_the_device_of_the_capture",
            ),
            *tests(
                "core/test_two_gpus.py",
                "test_a_replay_has_the_bits_of_padded_eager",
                "test_a_model_without_an_index_runs_where_its_cache_is",
                "test_a_bare_graph_replays_its_breaks_on_its_own_device",
            ),
            *tests(
                "core/test_runner_checks.py",
                "test_a_cache_that_does_not_fit_the_model_is_refused_with_both_shapes",
            ),
            *tests(
                "harness/test_faults.py",
                "test_an_output_that_breaks_the_contract_is_an_error_that_names_both[returns-other-device]",
            ),
        ),
    ),
)
"""Classes 29 to 36."""
