"""The page itself: all runs, all comparisons, one file that loads nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from bcg_harness.bench.compare import Comparison, comparable_pairs, compare_runs
from bcg_harness.bench.record import BenchReport
from bcg_harness.errors import HarnessError
from bcg_harness.html.chart import Panel
from bcg_harness.html.full_table import COLUMNS, WIDTH, backend_title
from bcg_harness.html.palette import DARK, LIGHT, ModeStyle, mode_styles
from bcg_harness.html.render import chart_png, panel_svg
from bcg_harness.html.run_view import RunView
from bcg_harness.html.runs import require_checks
from bcg_harness.html.units import milliseconds
from bcg_harness.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Source:
    """Name a run.

    Attributes:
        name: of its file.
        report: what it holds.
    """

    name: str
    report: BenchReport


@dataclass(frozen=True, kw_only=True)
class NamedComparison:
    """Name the two runs of a comparison.

    Attributes:
        before: name of the run that is referred to.
        after: name of the run that is judged.
        comparison: what came out.
    """

    before: str
    after: str
    comparison: Comparison


def compare_sources(sources: Sequence[Source]) -> list[NamedComparison]:
    """Compare each run with the last one before it of the same model on the same hardware, where there is one."""
    pairs = comparable_pairs([source.report for source in sources])
    return [
        NamedComparison(
            before=sources[before].name,
            after=sources[after].name,
            comparison=compare_runs(sources[before].report, sources[after].report),
        )
        for before, after in pairs
    ]


def view_runs(sources: Sequence[Source]) -> tuple[list[RunView], dict[str, ModeStyle]]:
    """Return what the page says of each run, and the style that each mode has in all of them.

    Titles that repeat get the name of the source. Raises HarnessError for a time without a passed check.
    """
    for source in sources:
        require_checks(source.report, source.name)
    modes = (mode for source in sources for mode in _all_modes(source.report))
    styles = mode_styles(modes)
    views = [
        RunView.of(source.report, anchor=f"run-{number}", source=source.name, styles=styles)
        for number, source in enumerate(sources, start=1)
    ]
    titles = [view.title for view in views]
    return [
        replace(view, title=f"{view.title} ({view.source})")
        if titles.count(view.title) > 1
        else view
        for view in views
    ], styles


def render_page(
    views: Sequence[RunView],
    styles: dict[str, ModeStyle],
    comparisons: Sequence[NamedComparison],
) -> str:
    """Return the whole page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    numbers = count(1)

    def draw(panel: Panel) -> Markup:
        # Every text in it went through matplotlib's escaping.
        return Markup(panel_svg(panel, salt=f"drawing {next(numbers)}"))

    environment = Environment(
        loader=PackageLoader("bcg_harness.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(draw=draw, milliseconds=milliseconds, backend=backend_title)
    text = environment.get_template("page.html.j2").render(
        runs=views,
        styles=styles,
        comparisons=comparisons,
        light=LIGHT.colours,
        dark=DARK.colours,
        columns=COLUMNS,
        width=WIDTH,
    )
    return "\n".join(line for raw in text.splitlines() if (line := raw.strip())) + "\n"


def make_folder(folder: Path) -> None:
    """Make the folder of the pictures, unless it is there; raises HarnessError where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(
            f"cannot make the folder {folder}: {error.strerror}; give --png a folder, new or not"
        ) from error


def write_charts(views: Sequence[RunView], folder: Path, progress: Progress) -> int:
    """Write each chart as ``NAME.png`` and ``NAME-dark.png`` into a folder; returns how many files that are.

    With more than one run, names begin with the run's number. Raises HarnessError for a file that cannot be written.
    """
    charts = sum(len(view.charts) for view in views)
    progress.start("pictures", 2 * charts)
    for number, view in enumerate(views, start=1):
        prefix = f"{number}-" if len(views) > 1 else ""
        for chart in view.charts:
            for palette, suffix in ((LIGHT, ""), (DARK, "-dark")):
                path = folder / f"{prefix}{chart.name}{suffix}.png"
                chart_png(chart, palette, path, context=view.context)
                progress.advance()
    return 2 * charts


def _all_modes(report: BenchReport) -> Iterable[str]:
    yield from report.modes()
    yield from (setup.mode for setup in report.setups)
