"""What stands on the page, and what it loads."""

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from bcg_harness.bench.cell import Cell, CheckSummary, DeviceTime, Status
from bcg_harness.bench.compare import compare_runs
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.spread import Speedup, Spread, Verdict
from bcg_harness.bench.timeline import Span, Timeline
from bcg_harness.errors import HarnessError
from bcg_harness.html.palette import DARK, LIGHT

Render = Callable[..., str]


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    assert re.findall(r"https?:|url\((?!#)|@import|<script|<link|<img|<iframe|src=", page) == []


def test_a_page_of_a_whole_run_is_small(page: str) -> None:
    assert len(page.encode()) < 1_000_000


def test_what_drawings_refer_to_is_defined_once(page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    used = set(re.findall(r'(?:href="#|url\(#)(\w+)', drawings))
    defined = re.findall(r' id="(\w+)"', drawings)
    assert sorted(defined) == sorted(used)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: str(palette.name))
def test_the_style_sheet_has_every_colour_of(page: str, palette: Any) -> None:
    missing = [r for r, colour in palette.colours.items() if f"--{r}:{colour};" not in page]
    assert missing == []


def test_dark_colours_apply_when_the_reader_prefers_them(page: str) -> None:
    dark = page.index("@media (prefers-color-scheme:dark)")
    assert page.index(f"--paper:{LIGHT['paper']}") < dark < page.index(f"--paper:{DARK['paper']}")


def test_drawings_use_variables_and_no_colours_of_their_own(page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawings)) == set()


def test_drawings_bring_no_style_sheet_for_the_whole_page(page: str) -> None:
    assert re.findall(r"<svg(?:(?!</svg>).)*<(?:style|metadata)", page, re.DOTALL) == []


def test_every_drawing_has_a_text_for_those_who_cannot_see_it(page: str) -> None:
    assert re.findall(r"<svg(?![^>]*role=\"img\" aria-label=\"[^\"]{20})[^>]*>", page) == []


def test_every_reason_is_on_the_page(page: str, recorded: BenchReport) -> None:
    reasons = {cell.reason for cell in recorded.cells if cell.reason}
    assert len(reasons) == 2
    assert [reason for reason in reasons if reason not in page] == []


def test_cells_without_times_are_gathered_under_their_reason(page: str) -> None:
    words = "sdpa, flashinfer[kernel=fa3], flash_attn[version=3], xformers: all workloads"
    assert words in page


@pytest.mark.parametrize(
    "words",
    [
        "Example GPU 80GB",
        "driver 1.2.3",
        "torch 2.13.0+cu130",
        "16 layers, D 2048, 32/8 heads of 64",
        "bfloat16",
        "2026-01-02 03:04",
        "16, 32, 64, 128, 256, 512, 1024, 2048",
        "needs torch 2.11 or newer",
        "gathers keys request by request",
        "A break that does nothing costs 5.70 µs of the host&#39;s time",
        "2048: out of memory",
    ],
)
def test_the_context_is_on_the_page(page: str, words: str) -> None:
    assert words in page


def test_all_measures_of_a_cell_are_in_the_table(
    render: Render, read: Callable[[str], str], brief: BenchReport
) -> None:
    cell = Cell(
        backend="sdpa",
        mode="breakable",
        workload="single-16",
        status=Status.MEASURED,
        check=CheckSummary(error=0.0032, budget=0.0081, what="raw_shape"),
        latency=Spread(samples=5, median=0.001234, p90=0.0015, q1=0.0012, q3=0.0013),
        ttft=Spread(samples=5, median=0.0021, p90=0.0022, q1=0.002, q3=0.0022),
        enqueue=Spread(samples=5, median=0.0007, p90=0.0007, q1=0.0007, q3=0.0007),
        device=DeviceTime(busy=0.0009, gap=0.000334, launches=33, kernels=1234),
        real_tokens=12,
        padded_tokens=16,
        peak_memory=3 * 2**30,
        speedup=Speedup(ratio=2.5, verdict=Verdict.FASTER),
    )
    page = render(replace(brief, cells=(cell,)))
    row = page[page.index('<tr><th scope="row"><i') :]
    expected = (
        "breakable 1.234 1.500 0.100 2.50× faster 2.100 2.200 0.700 33 0.900 0.334 1,234 25.0 % 9,724 3.00 3.2e-03 "
        "8.1e-03"
    )
    assert expected in read(row)


def test_the_headline_says_how_many_backends_gain_how_much(page: str) -> None:
    assert re.search(
        r"16 tokens:</strong> compared with eager, breakable is faster with all 5 backends "
        r"\(2\.\d\d× to 2\.\d\d×\)",
        page,
    )


def test_a_gap_below_zero_is_a_dash(
    render: Render, read: Callable[[str], str], brief: BenchReport
) -> None:
    negative = DeviceTime(busy=0.7777, gap=-0.0123, launches=1, kernels=1)
    cell = replace(brief.cells[0], device=negative)
    text = read(render(replace(brief, cells=(cell,))))
    assert "777.700 – 1 " in text
    assert "-12.3" not in text


@pytest.mark.parametrize(
    ("check", "words"),
    [
        pytest.param(None, "was never checked", id="none"),
        pytest.param(
            CheckSummary(error=0.02, budget=0.01, what="x"), "error of 2.0e-02", id="over-budget"
        ),
        pytest.param(
            CheckSummary(error=float("nan"), budget=0.01, what="x"), "error of nan", id="nan"
        ),
    ],
)
def test_times_without_a_passed_check_are_refused(
    render: Render, brief: BenchReport, check: CheckSummary | None, words: str
) -> None:
    cells = (replace(brief.cells[0], check=check), *brief.cells[1:])
    with pytest.raises(HarnessError, match=rf"run0\.json: eager, sdpa, single-16: .*{words}"):
        render(replace(brief, cells=cells))


def test_titles_that_repeat_have_the_file_in_them(render: Render, brief: BenchReport) -> None:
    page = render(brief, brief)
    titles = re.findall(r"<h2 id=\"run-\d-title\">(.*?)</h2>", page)
    assert titles == [
        "llama-1b on Example GPU 80GB (run0.json)",
        "llama-1b on Example GPU 80GB (run1.json)",
    ]


def test_a_title_of_its_own_needs_no_file(page: str) -> None:
    assert 'title">llama-1b on Example GPU 80GB</h2>' in page


def test_a_run_of_the_emulator_is_loud_about_it(render: Render, brief: BenchReport) -> None:
    environment = {**brief.environment, "device": "cpu", "engine": "CPU emulator"}
    page = render(replace(brief, environment=environment, cells=(), timelines=()))
    assert "This run measured the CPU emulator.</strong> Its times say nothing of a GPU" in page
    assert "CPU EMULATOR" in page


def test_a_run_on_a_gpu_has_no_such_warning(page: str) -> None:
    assert "emulator" not in page.lower()


@pytest.mark.parametrize("end", ["interrupted", "CUDA error: out of memory"])
def test_a_run_that_ended_early_says_so_and_why(
    render: Render, brief: BenchReport, end: str
) -> None:
    page = render(replace(brief, end=end, cells=()))
    assert f"ended before its last measurement.</strong> What ended it: {end}" in page


def test_a_whole_run_has_no_such_warning(page: str) -> None:
    assert "before its last measurement" not in page


def test_failed_checks_are_announced_above_all_numbers(page: str) -> None:
    announced = page.index("1 measurement of breakable failed a check or broke off")
    assert announced < page.index("In short</h3>")


HOSTILE = '<b onclick="x">&$\\frac$'


@pytest.fixture(scope="module")
def hostile(recorded: BenchReport) -> BenchReport:
    """Return a run in which every name that others choose holds HTML and TeX."""
    cells = tuple(
        replace(cell, backend=HOSTILE, reason=HOSTILE if cell.reason else "", served={HOSTILE: 1})
        for cell in recorded.cells
        if cell.backend == "sdpa"
    )
    workloads = tuple(replace(w, description=HOSTILE) for w in recorded.workloads)
    renamed = workloads[-1].name
    return replace(
        recorded,
        cells=tuple(
            replace(c, workload=HOSTILE) if c.workload == renamed else c for c in cells
        ),
        workloads=(*workloads[:-1], replace(workloads[-1], name=HOSTILE)),
        model={**recorded.model, "name": HOSTILE},
        environment={**recorded.environment, "hardware": HOSTILE, "libraries": {HOSTILE: HOSTILE}},
        settings={HOSTILE: HOSTILE},
        skipped={HOSTILE: HOSTILE},
        notes={HOSTILE: [HOSTILE]},
        timelines=(
            Timeline(
                backend=HOSTILE,
                mode="breakable",
                workload=HOSTILE,
                spans=(Span(lane="host", name=HOSTILE, start=0.0, seconds=1.0),),
            ),
        ),
        setups=(replace(recorded.setups[0], mode=HOSTILE),),
    )  # fmt: skip


def test_names_cannot_bring_html(render: Render, hostile: BenchReport) -> None:
    page = render(hostile, replace(hostile, settings={}))
    assert "<b onclick" not in page
    assert page.count("&lt;b onclick") > 40


def test_names_are_no_formulas_in_drawings(render: Render, hostile: BenchReport) -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", render(hostile))
    assert HOSTILE in map(unescape, texts)


def test_runs_share_the_page_with_a_list_of_contents(render: Render, brief: BenchReport) -> None:
    page = render(brief, brief)
    assert re.findall(r'<li><a href="#(.*?)"', page) == ["run-1", "run-2", "comparison"]
    assert [page.count(f'id="{anchor}"') for anchor in ("run-1", "run-2", "comparison")] == [1] * 3


def test_every_link_has_a_target(render: Render, brief: BenchReport) -> None:
    page = render(brief, brief)
    targets = set(re.findall(r'<a href="#(.*?)"', page))
    assert [name for name in targets if page.count(f' id="{name}"') != 1] == []


def test_a_comparison_lists_what_moved(
    render: Render, recorded: BenchReport, repeated: BenchReport
) -> None:
    page = render(recorded, repeated)
    comparison = compare_runs(recorded, repeated)
    assert comparison.moved
    assert comparison.summary in page
    section = page[page.index('id="comparison"') :]
    assert section.count('<tr><th scope="row">') == len(comparison.moved)


def test_a_comparison_without_moves_says_so(render: Render, brief: BenchReport) -> None:
    assert "No median moved by more than 5 %" in render(brief, brief)


def test_runs_of_different_models_are_not_compared(render: Render, brief: BenchReport) -> None:
    other = replace(brief, model={**brief.model, "name": "other"})
    assert 'id="comparison"' not in render(brief, other)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"cells": (), "workloads": (), "setups": (), "timelines": ()}, id="nothing"),
        pytest.param({"environment": {}, "model": {}, "settings": {}}, id="no-context"),
        pytest.param({"setups": ()}, id="no-setups"),
        pytest.param({"break_overhead": None, "bucket_costs": ()}, id="no-costs"),
    ],
)
def test_a_run_may_lack(render: Render, brief: BenchReport, change: dict[str, Any]) -> None:
    assert "</html>" in render(replace(brief, **change))


def test_a_run_without_breakable_has_no_headline(render: Render, brief: BenchReport) -> None:
    cells = tuple(cell for cell in brief.cells if cell.mode == "eager")
    page = render(replace(brief, cells=cells))
    assert "No replay of breakable was measured against eager in this run." in page
