"""Charts: what they show of a run, and that they come out as pictures."""

from dataclasses import replace
from pathlib import Path

import pytest

from bcg_harness.bench.cell import NO_BACKEND, Status
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Speedup, Verdict
from bcg_harness.bench.timeline import Span
from bcg_harness.errors import HarnessError
from bcg_harness.html.buckets import bucket_chart, ladder_of, padding_by_bucket
from bcg_harness.html.chart import Area, Chart
from bcg_harness.html.heatmap import heat_map
from bcg_harness.html.latency import latency_chart
from bcg_harness.html.palette import DARK, HEAT_STEPS, LIGHT, PAGE, heat_step, mode_styles
from bcg_harness.html.render import chart_png, panel_svg
from bcg_harness.html.setup_chart import setup_chart
from bcg_harness.html.timeline import idle_gaps, timeline_charts

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def latency(recorded: BenchReport) -> Chart:
    return latency_chart(recorded, mode_styles(recorded.modes()))


def test_latency_has_a_panel_for_each_backend(latency: Chart, recorded: BenchReport) -> None:
    backends = [backend for backend in recorded.backends() if backend != NO_BACKEND]
    assert [panel.title for panel in latency.panels] == backends


def test_a_mode_with_its_own_attention_is_in_every_panel(latency: Chart) -> None:
    assert all("transformers_eager" in panel.alt for panel in latency.panels)


def test_a_mode_that_was_nowhere_measured_has_no_key(recorded: BenchReport) -> None:
    cells = tuple(
        replace(c, status=Status.ERROR, latency=None) if c.mode == "full" else c
        for c in recorded.cells
    )
    chart = latency_chart(replace(recorded, cells=cells), mode_styles(recorded.modes()))
    assert "full" not in [key.label for key in chart.keys]


def test_heat_map_tells_apart_what_is_close_what_is_missing_and_what_is_fast(
    recorded: BenchReport,
) -> None:
    cells = tuple(
        replace(cell, speedup=Speedup(ratio=1.02, verdict=Verdict.TOO_CLOSE))
        if (cell.mode, cell.workload) == ("breakable", "single-2048")
        else replace(cell, speedup=Speedup(ratio=2.5, verdict=Verdict.FASTER))
        if (cell.mode, cell.workload) == ("breakable", "single-16")
        else replace(cell, speedup=None)
        for cell in recorded.cells
    )
    single, _ = heat_map(replace(recorded, cells=cells)).panels
    assert "sdpa: 16 2.50, 64 n/a, 256 n/a, 512 n/a, 1k n/a, 2k ≈1.02, 8k n/a." in single.alt


@pytest.mark.parametrize(
    ("ratio", "step"),
    [
        pytest.param(0.3, 0, id="far-slower"),
        pytest.param(0.949, 3, id="slower"),
        pytest.param(1.0, 4, id="equal"),
        pytest.param(1.05, 5, id="faster"),
        pytest.param(9.0, len(HEAT_STEPS), id="far-faster"),
    ],
)
def test_heat_grows_with_the_ratio(ratio: float, step: int) -> None:
    assert heat_step(ratio) == step


def span(start: float, seconds: float) -> Span:
    return Span(lane="device", name="kernel", start=start, seconds=seconds)


@pytest.mark.parametrize(
    ("spans", "gaps"),
    [
        pytest.param([], [], id="none"),
        pytest.param([span(0, 1), span(1, 1)], [], id="touching"),
        pytest.param([span(0, 1), span(3, 1)], [(1, 3)], id="apart"),
        pytest.param([span(3, 1), span(0, 1)], [(1, 3)], id="unsorted"),
        pytest.param([span(0, 5), span(1, 1), span(6, 1)], [(5, 6)], id="overlapping"),
    ],
)
def test_gaps_of_the_device(spans: list[Span], gaps: list[tuple[float, float]]) -> None:
    assert idle_gaps(spans) == gaps


def test_a_time_line_shows_all_of_it_and_some_layers(recorded: BenchReport) -> None:
    chart = timeline_charts(recorded)[0]
    assert [panel.title for panel in chart.panels] == ["The whole replay", "3 layers from its middle"]  # fmt: skip


def test_a_time_line_of_few_layers_has_no_close_up(recorded: BenchReport) -> None:
    first = recorded.timelines[0]
    short = replace(first, spans=tuple(s for s in first.spans if s.start < 2e-4))
    assert len(timeline_charts(replace(recorded, timelines=(short,)))[0].panels) == 1


def test_a_time_line_without_device_says_so(recorded: BenchReport) -> None:
    first = recorded.timelines[0]
    host = replace(first, spans=tuple(s for s in first.spans if s.lane == "host"))
    (chart,) = timeline_charts(replace(recorded, timelines=(host,)))
    assert "What the device did was not recorded." in chart.caption


def test_a_time_line_is_a_few_paths_however_many_kernels(recorded: BenchReport) -> None:
    panel = timeline_charts(recorded)[0].panels[0]
    assert panel_svg(panel, salt="x").count("<path") < 40


def test_padding_is_that_of_the_batches_a_bucket_serves(recorded: BenchReport) -> None:
    padding = padding_by_bucket(recorded, [64, 256, 2048])
    assert padding[64] == pytest.approx(1 - (16 + 64) / 128)


def test_batches_that_no_bucket_holds_have_no_padding(recorded: BenchReport) -> None:
    assert padding_by_bucket(recorded, [8]) == {}


def test_the_ladder_is_that_of_breakable(recorded: BenchReport) -> None:
    shorter = replace(recorded.setups[1], buckets=recorded.setups[1].buckets[:1])
    report = replace(recorded, setups=(shorter, recorded.setups[0]))
    assert ladder_of(report) == sorted(b.bucket for b in recorded.setups[0].buckets)


def test_modes_that_need_no_set_up_have_no_row(recorded: BenchReport) -> None:
    setups = (replace(recorded.setups[0], warm_up_seconds=0.0, capture_seconds=0.0),)
    assert setup_chart(replace(recorded, setups=setups), mode_styles(["breakable"])).panels == ()


def test_a_mode_looks_the_same_whatever_else_is_shown() -> None:
    alone, together = mode_styles(["breakable"]), mode_styles(["x", "eager", "breakable", "y"])
    assert alone["breakable"] == together["breakable"]


def test_no_two_modes_look_alike() -> None:
    modes = [
        "eager", "eager_fused", "padded_eager", "breakable", "breakable_unfused", "full",
        "compile_piecewise", "transformers_eager", "unknown", "other",
    ]  # fmt: skip
    styles = mode_styles(modes)
    assert len({(style.role, style.glyph) for style in styles.values()}) == len(modes)


def test_any_number_of_unknown_modes_has_styles() -> None:
    assert len(mode_styles(map(str, range(50)))) == 50


def test_all_palettes_have_the_same_roles() -> None:
    assert set(LIGHT.colours) == set(DARK.colours) == set(PAGE.colours)


@pytest.fixture(scope="module")
def charts(recorded: BenchReport) -> dict[str, Chart]:
    styles = mode_styles(recorded.modes())
    all_charts = [
        latency_chart(recorded, styles),
        heat_map(recorded),
        timeline_charts(recorded)[0],
        bucket_chart(recorded, styles),
        setup_chart(recorded, styles),
    ]
    return {chart.name: chart for chart in all_charts}


@pytest.mark.parametrize("name", ["latency", "speedup", "timeline-1", "buckets", "setup"])
def test_a_chart_comes_out_as_picture(charts: dict[str, Chart], tmp_path: Path, name: str) -> None:
    path = tmp_path / "chart.png"
    chart_png(charts[name], DARK, path, context="GPU")
    assert path.read_bytes().startswith(PNG)


def test_day_and_night_differ(charts: dict[str, Chart], tmp_path: Path) -> None:
    chart_png(charts["setup"], LIGHT, tmp_path / "light.png", context="GPU")
    chart_png(charts["setup"], DARK, tmp_path / "dark.png", context="GPU")
    assert (tmp_path / "light.png").read_bytes() != (tmp_path / "dark.png").read_bytes()


def test_the_same_chart_is_the_same_text(charts: dict[str, Chart]) -> None:
    (panel,) = charts["setup"].panels
    assert panel_svg(panel, salt="a") == panel_svg(panel, salt="a")


def test_a_picture_that_cannot_be_written_is_named(
    charts: dict[str, Chart], tmp_path: Path
) -> None:
    with pytest.raises(HarnessError, match=r"cannot write .*nowhere/x\.png"):
        chart_png(charts["setup"], LIGHT, tmp_path / "nowhere" / "x.png", context="GPU")


def test_settings_of_matplotlib_are_put_back(charts: dict[str, Chart], tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "path", "axes.grid": True}):
        before = dict(matplotlib.rcParams)
        panel_svg(charts["setup"].panels[0], salt="a")
        assert dict(matplotlib.rcParams) == before


def test_kinds_of_bars_of_the_host_differ_in_more_than_colour(recorded: BenchReport) -> None:
    from matplotlib.figure import Figure

    panel = timeline_charts(recorded)[0].panels[0]
    figure = Figure(figsize=(16, 3), dpi=72)
    area = Area(figure=figure, palette=LIGHT, left=0, top=0, width=panel.width, height=panel.height)
    panel.draw(area)
    heights = {
        patch.get_facecolor(): round(patch.get_path().get_extents().height, 2)
        for patch in figure.axes[0].patches
        if patch.get_path().get_extents().y0 < 1
    }
    assert sorted(heights.values()) == [0.46, 0.66, 0.86]
