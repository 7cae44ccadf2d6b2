"""What a mode that replays graphs ran without one: no speed-up of it is claimed, and it is marked everywhere."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from bcg_harness.bench.record import BenchReport
from bcg_harness.html.chart import Area, Chart
from bcg_harness.html.heatmap import heat_map
from bcg_harness.html.latency import latency_chart
from bcg_harness.html.palette import LIGHT, mode_styles

Render = Callable[..., str]
Read = Callable[[str], str]
TOO_LONG = "more tokens than the largest bucket (2048)"


def latency(report: BenchReport) -> Chart:
    return latency_chart(report, mode_styles(report.modes()))


@pytest.fixture
def read_headline(read: Read) -> Read:
    return lambda page: read(page[page.index("In short</h3>") : page.index("Latency of one")])


def test_the_largest_size_of_the_headline_is_one_that_a_bucket_served(
    page: str, read_headline: Read
) -> None:
    assert "2,048 tokens: compared with eager, breakable is" in read_headline(page)


def test_the_headline_says_what_it_leaves_out_and_why(page: str, read_headline: Read) -> None:
    words = f"Left out: 8,192 tokens, where breakable ran batches without a graph: {TOO_LONG}."
    assert words in read_headline(page)
    assert read_headline(page).count("8,192 tokens") == 1


def serve(report: BenchReport, workload: str, backend: str, served: dict[str, int]) -> BenchReport:
    """Return ``report`` with how breakable served ``workload`` with ``backend`` replaced."""
    place = (backend, "breakable", workload)
    cells = (
        replace(c, served=served) if (c.backend, c.mode, c.workload) == place else c
        for c in report.cells
    )
    return replace(report, cells=tuple(cells))


@pytest.mark.parametrize(
    ("served", "mark"),
    [
        pytest.param({"too many requests": 4}, "no graph", id="all"),
        pytest.param({"bucket 16": 3, "too many requests": 1}, "partly no graph", id="some"),
    ],
)
def test_a_cell_without_a_graph_counts_for_no_backend_of_the_headline_and_is_marked(
    render: Render,
    read: Read,
    read_headline: Read,
    recorded: BenchReport,
    served: dict[str, int],
    mark: str,
) -> None:
    page = render(serve(recorded, "single-16", "sdpa", served))
    assert "breakable is faster with all 4 backends" in read_headline(page)
    assert "16 tokens – ran without a graph" in read_headline(page)
    assert f"breakable {mark} " in read(page)
    assert f"faster, {mark}" in read(page)
    assert "too many requests (" in read(page)


def test_a_run_without_any_replay_claims_nothing(render: Render, brief: BenchReport) -> None:
    cells = tuple(replace(cell, served={"too long": 1}) for cell in brief.cells)
    page = render(replace(brief, cells=cells, setups=()))
    assert "No replay of breakable was measured against eager in this run. Left out:" in page


def test_the_fastest_of_a_workload_says_that_it_had_no_graph(page: str) -> None:
    ends = {
        tokens: re.findall(rf"one prompt of {tokens} tokens · fastest: .* ms( .*)?</span>", page)
        for tokens in (2048, 8192)
    }
    assert ends == {2048: [""], 8192: [" (no graph)"]}


def test_what_served_a_cell_needs_no_hovering(page: str, read: Read) -> None:
    assert "bucket 16 (50 times)" in read(page)


def test_heat_map_sets_apart_what_ran_without_a_graph(recorded: BenchReport) -> None:
    single, _ = heat_map(recorded).panels
    assert re.search(r"sdpa: 16 \d\.\d\d, .* 8k \(≈?\d\.\d\d\)\.", single.alt)


@pytest.mark.parametrize("chart", [heat_map, latency], ids=["heat", "latency"])
def test_a_chart_explains_its_marks_for_no_graph_where_it_has_some(
    recorded: BenchReport, chart: Callable[[BenchReport], Chart]
) -> None:
    shorter = tuple(w for w in recorded.workloads if w.name != "single-8192")
    cells = tuple(c for c in recorded.cells if c.workload != "single-8192")
    with_some, without = chart(recorded), chart(replace(recorded, workloads=shorter, cells=cells))
    words = "ran without a graph"
    assert f"{words}: {TOO_LONG}." in with_some.caption
    assert words not in without.caption
    assert [words in [key.label for key in c.keys] for c in (with_some, without)] == [True, False]


def test_latency_tells_which_ends_ran_without_a_graph(recorded: BenchReport) -> None:
    panel = latency(recorded).panels[0]
    assert re.search(r"breakable \S+ ms at 16 and \S+ ms \(without a graph\) at 8192", panel.alt)
    assert re.search(r"; padded_eager \S+ ms at 16 and \S+ ms at 8192", panel.alt)


def test_points_without_a_graph_are_drawn_open(recorded: BenchReport) -> None:
    from matplotlib.figure import Figure

    panel = latency(recorded).panels[0]
    figure = Figure(figsize=(5, 4), dpi=72)
    panel.draw(
        Area(figure=figure, palette=LIGHT, left=0, top=0, width=panel.width, height=panel.height)
    )
    lines = figure.axes[0].lines
    open_at = [list(line.get_xdata()) for line in lines if line.get_linestyle() == "None"]
    assert sorted(filter(None, open_at)) == [[8192]] * 2
