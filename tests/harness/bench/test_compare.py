"""Comparing two runs: what moved, by how much, and what else differs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bcg_harness.bench.cell import Cell, Status
from bcg_harness.bench.compare import comparable, comparable_pairs, compare_runs
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Spread, Verdict


def spread(median: float, *, noise: float = 0.01) -> Spread:
    return Spread(
        samples=9,
        median=median,
        p90=median * (1 + noise),
        q1=median * (1 - noise),
        q3=median * (1 + noise),
    )


def cell(mode: str = "eager", **values: Any) -> Cell:
    known = {"backend": "sdpa", "workload": "single-16", "status": Status.MEASURED}
    return Cell(**{**known, "mode": mode, **values})


def run(*cells: Cell, **values: Any) -> BenchReport:
    empty: dict[str, Any] = {
        "started": "2026-01-01T00:00:00",
        "seconds": 1.0,
        "environment": {"device": "cuda", "hardware": "GPU", "libraries": {"torch": "2.11"}},
        "model": {"name": "tiny", "num_layers": 4, "dtype": "bfloat16"},
        "settings": {"seed": 0},
        "workloads": (),
        "skipped": {},
        "notes": {},
        "setups": (),
        "break_overhead": None,
        "bucket_costs": (),
        "timelines": (),
    }
    return BenchReport(**{**empty, **values, "cells": cells})


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        pytest.param(1.0, False, id="same"),
        pytest.param(1.04, False, id="up-by-less"),
        pytest.param(1.06, True, id="up-by-more"),
        pytest.param(0.96, False, id="down-by-less"),
        pytest.param(0.94, True, id="down-by-more"),
    ],
)
def test_a_median_moves_when_it_is_more_than_the_threshold_away(after: float, moved: bool) -> None:
    found = compare_runs(run(cell(latency=spread(1.0))), run(cell(latency=spread(after))))
    assert bool(found.moved) is moved


@pytest.mark.parametrize("measure", ["latency", "ttft", "enqueue"])
def test_every_measure_with_a_median_is_compared(measure: str) -> None:
    found = compare_runs(run(cell(**{measure: spread(1.0)})), run(cell(**{measure: spread(2.0)})))
    assert [(move.measure, move.ratio) for move in found.moved] == [(measure, 2.0)]


@pytest.mark.parametrize(
    ("enqueue", "cause"),
    [
        pytest.param(1.6, "host", id="queued-for-longer"),
        pytest.param(1.5, "host", id="half-of-it"),
        pytest.param(1.4, "device", id="less-than-half"),
        pytest.param(1.0, "device", id="queued-as-before"),
        pytest.param(0.4, "device", id="queued-faster-though-slower"),
    ],
)
def test_a_move_is_the_hosts_where_half_of_it_is_queueing(enqueue: float, cause: str) -> None:
    before = run(cell(latency=spread(2.0), enqueue=spread(1.0)))
    after = run(cell(latency=spread(3.0), enqueue=spread(enqueue)))
    found = compare_runs(before, after)
    move = next(move for move in found.moved if move.measure == "latency")
    assert move.cause == cause
    assert f"on the {cause}" in str(move)


def test_the_threshold_can_be_chosen() -> None:
    runs = run(cell(latency=spread(1.0))), run(cell(latency=spread(1.2)))
    assert not compare_runs(*runs, threshold=0.25).moved


def test_what_moved_farthest_comes_first_whichever_way() -> None:
    before = run(cell("a", latency=spread(1.0)), cell("b", latency=spread(1.0)))
    after = run(cell("a", latency=spread(1.5)), cell("b", latency=spread(0.4)))
    assert [move.mode for move in compare_runs(before, after).moved] == ["b", "a"]


@pytest.mark.parametrize(
    ("noise", "verdict"),
    [
        pytest.param(0.01, Verdict.SLOWER, id="narrow"),
        pytest.param(0.5, Verdict.TOO_CLOSE, id="overlapping"),
    ],
)
def test_a_move_says_whether_the_spreads_overlap(noise: float, verdict: Verdict) -> None:
    found = compare_runs(
        run(cell(latency=spread(1.0, noise=noise))), run(cell(latency=spread(1.1, noise=noise)))
    )
    assert found.moved[0].change.verdict is verdict


def test_a_move_is_told_with_place_measure_ratio_and_both_medians() -> None:
    found = compare_runs(run(cell(latency=spread(0.001))), run(cell(latency=spread(0.0015))))
    told = "eager, sdpa, single-16: latency 1.50 times the former (1.000 to 1.500 ms; slower; on the device)"
    assert str(found.moved[0]) == told


@pytest.mark.parametrize(
    ("after", "words"),
    [
        pytest.param(1.01, "no median moved by more than 5 % (of 1 compared)", id="still"),
        pytest.param(
            1.5, "1 of 1 medians moved by more than 5 %: 1 up (slower), 0 down (faster)", id="up"
        ),
        pytest.param(
            0.5, "1 of 1 medians moved by more than 5 %: 0 up (slower), 1 down (faster)", id="down"
        ),
    ],
)
def test_the_summary_counts(after: float, words: str) -> None:
    found = compare_runs(run(cell(latency=spread(1.0))), run(cell(latency=spread(after))))
    assert found.summary.split(";")[0] == words


def test_runs_without_a_common_median_say_so() -> None:
    found = compare_runs(run(cell("a", latency=spread(1.0))), run(cell("b", latency=spread(1.0))))
    assert found.summary == "the runs have no median in common"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param(
            run(cell()), run(), "eager, sdpa, single-16: only in the first run", id="went"
        ),
        pytest.param(
            run(), run(cell()), "eager, sdpa, single-16: only in the second run", id="came"
        ),
        pytest.param(
            run(cell()),
            run(cell(status=Status.FAILED, reason="wrong")),
            "eager, sdpa, single-16: measured, then failed (wrong)",
            id="broke",
        ),
        pytest.param(
            run(cell(status=Status.ERROR, reason="no memory")),
            run(cell()),
            "eager, sdpa, single-16: error, then measured (no memory)",
            id="was-repaired",
        ),
    ],
)
def test_cells_that_came_went_or_changed_are_named(
    before: BenchReport, after: BenchReport, words: str
) -> None:
    assert compare_runs(before, after).changed == (words,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({}, (), id="nothing"),
        pytest.param({"settings": {"seed": 1}}, ("seed: 0, then 1",), id="setting"),
        pytest.param(
            {"environment": {"libraries": {"torch": "2.13"}}},
            ("torch: 2.11, then 2.13",),
            id="library",
        ),
        pytest.param(
            {"environment": {"libraries": {}}}, ("torch: 2.11, then nothing",), id="missing-library"
        ),
        pytest.param(
            {"environment": {"driver": "2", "libraries": {"torch": "2.11"}}},
            ("driver: None, then 2",),
            id="driver",
        ),
    ],
)
def test_software_and_settings_that_differ_are_named(
    change: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert compare_runs(run(), run(**change)).differences == words


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param({}, True, id="same"),
        pytest.param({"settings": {"seed": 3}}, True, id="other-settings"),
        pytest.param({"model": {"name": "tiny", "dtype": "float16"}}, False, id="other-dtype"),
        pytest.param(
            {"environment": {"device": "cuda", "hardware": "other"}}, False, id="other-gpu"
        ),
        pytest.param(
            {"environment": {"device": "cpu", "hardware": "GPU"}}, False, id="other-device"
        ),
    ],
)
def test_runs_are_comparable_on_the_same_model_and_hardware(
    change: dict[str, Any], same: bool
) -> None:
    assert comparable(run(), run(**change)) is same


@pytest.fixture
def other() -> Callable[[], BenchReport]:
    return lambda: replace(run(), model={"name": "other"})


def test_each_run_is_paired_with_the_last_comparable_one(other: Callable[[], BenchReport]) -> None:
    assert list(comparable_pairs([run(), other(), run(), run(), other()])) == [
        (0, 2),
        (2, 3),
        (1, 4),
    ]
