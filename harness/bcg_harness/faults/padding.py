"""Faults in padded rows, and in the choice of a bucket."""

from bcg_harness.faults.record import Caught, Fault, found, tests

PADDING = (
    Fault(
        number=8,
        title="keys of padded rows are written to somebody's slots, or all keys to the slots of the capture",
        caught=Caught.CHECK,
        by="`kv_isolation`",
        how="Every slot outside the batch must keep its bits, every slot of the batch must change, and page 0 must "
        "stay finite.",
        proofs=(
            *found(
                "runner-freezes-slots",
                "runner-forgets-padded-slots",
                "backend-writes-cache",
                "backend-spoils-reserved-page",
            ),
            *tests(
                "core/test_runner_faults.py",
                "test_no_cache_row_outside_of_the_slots_of_the_batch_changes",
                "test_slots_are_those_of_the_batch_and_not_of_the_capture",
            ),
        ),
    ),
    Fault(
        number=9,
        title="metadata is made for the padded number of tokens",
        caught=Caught.CHECK,
        by="`structure`, `attention`",
        how="The backend must be asked to plan for the live batch, once, and be given as many rows as it has tokens.",
        proofs=(
            *found("runner-plans-for-padded-count", "runner-gives-padded-rows"),
            *tests("core/test_runner_faults.py", "test_metadata_is_made_for_the_real_count"),
        ),
    ),
    Fault(
        number=10,
        title="padded rows of the attention output keep NaN or an earlier batch, which a reduction brings to real rows",
        caught=Caught.CHECK,
        by="`padding`",
        how="All memory is NaN before a replay; afterwards padded rows must be zero, and rows beyond the bucket NaN, "
        "also behind the largest.",
        proofs=(
            *found(
                "runner-forgets-padded-output",
                "backend-writes-row-r",
                "backend-writes-row-r-of-the-bucket",
                "backend-writes-row-r-of-the-largest-bucket",
                "model-divides-by-slot",
                "backend-writes-nan-behind-rows",
            ),
            *tests(
                "core/test_runner_faults.py",
                "test_unwritten_rows_do_not_reach_real_ones_through_a_reduction",
                "test_a_runner_that_forgets_to_clear_the_tail_is_found_by_that_reduction",
            ),
        ),
    ),
    Fault(
        number=11,
        title="positions that a longer batch left in padded rows index past the RoPE table",
        caught=Caught.CHECK,
        by="`padding`",
        how="Padded ids and positions must be 0 and padded slots in the reserved page, whatever was there before.",
        proofs=(
            *found(
                "runner-forgets-padded-positions",
                "runner-forgets-padded-ids",
                "runner-forgets-padded-inputs",
            ),
            *tests(
                "core/test_runner_faults.py",
                "test_stale_positions_of_an_earlier_batch_are_not_looked_up",
                "test_a_short_batch_after_a_long_one_has_a_clean_padded_tail",
            ),
        ),
    ),
    Fault(
        number=12,
        title="rows at the edges of a bucket are wrong",
        caught=Caught.CHECK,
        by="all, on cases at the edges",
        how="Cases have 0, 1, bucket - 1, bucket and bucket + 1 tokens, also behind prefixes; `bcg fuzz` prefers them.",
        proofs=(
            *found(
                "runner-loses-last-row",
                "runner-loses-last-row-of-a-nan-cache",
                "runner-skips-full-bucket",
            ),
            *tests(
                "harness/test_faults.py",
                "test_a_row_that_is_lost_in_a_full_bucket_is_found_nowhere_else",
            ),
            *tests("harness/fuzz/test_draw.py", "test_edges_of_buckets_are_drawn"),
        ),
    ),
    Fault(
        number=13,
        title="a sparse ladder replays far more work than it saves, or a guard sends everything to eager",
        caught=Caught.CHECK,
        by="`structure`",
        how="The smallest bucket that fits must serve. The default ladder bounds padding, and `bcg bench` shows it.",
        proofs=(
            *found("runner-falls-back-silently", "runner-skips-full-bucket"),
            *tests(
                "core/test_buckets.py",
                "test_a_selection_is_the_table_it_should_be",
                "test_padding_in_a_default_ladder_is_bounded",
            ),
        ),
    ),
)
"""Classes 8 to 13."""
