"""``bcg report``: read results of ``bcg bench``, write a page and pictures, and say what moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bcg_harness.bench.record import BenchReport
from bcg_harness.cli_errors import usage_errors
from bcg_harness.cli_progress import progress_bar
from bcg_harness.errors import HarnessError
from bcg_harness.html.extra import require_report_extra
from bcg_harness.html.page import (
    NamedComparison,
    Source,
    compare_sources,
    make_folder,
    render_page,
    view_runs,
    write_charts,
)
from bcg_harness.json_file import require_writable

_MOST_MOVES = 20


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Hold what the command was asked for.

    Attributes:
        files: results of ``bcg bench --json``.
        output: where the page goes; None is beside the first file, under its name.
        png: folder of the pictures; None is beside the page.
        pictures: whether there are to be pictures at all.
    """

    files: tuple[Path, ...]
    output: Path | None
    png: Path | None
    pictures: bool


def write_report(options: ReportOptions) -> None:
    """Write page and pictures of ``options``; raises ``typer.Exit`` with status 2 for wrong use."""
    console = Console(soft_wrap=True, highlight=False)
    output = options.output or options.files[0].with_suffix(".html")
    folder = options.png or output.with_name(f"{output.stem}-charts")
    with usage_errors():
        require_report_extra()
        if options.png is not None and not options.pictures:
            raise HarnessError(
                f"--png {options.png} asks for pictures and --no-pictures for none: leave one of them out"
            )
        if output.resolve() in [path.resolve() for path in options.files]:
            raise HarnessError(f"{output} is a result to read: give another file with --output")
        sources = _read_all(options.files)
        require_writable(output)
        views, styles = view_runs(sources)
        comparisons = compare_sources(sources)
        page = render_page(views, styles, comparisons)
        if options.pictures:
            make_folder(folder)
        _write(page, output)
        console.print(f"{escape(str(output))}: {len(page.encode()) / 2**20:.2f} MiB")
        if options.pictures:
            with progress_bar() as bar:
                count = write_charts(views, folder, bar)
            console.print(f"{escape(str(folder))}: {count} pictures")
    for comparison in comparisons:
        _print_comparison(console, comparison)


def _read_all(paths: Sequence[Path]) -> list[Source]:
    names = _distinct([path.name for path in paths], [str(path) for path in paths])
    return [
        Source(name=name, report=BenchReport.load(path))
        for name, path in zip(names, paths, strict=True)
    ]


def _distinct(names: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return file names, or paths where names repeat, with a number where paths repeat too."""
    if len(set(names)) == len(names):
        return list(names)
    return [
        f"{path} (#{paths[:at].count(path) + 1})" if paths.count(path) > 1 else path
        for at, path in enumerate(paths)
    ]


def _write(page: str, output: Path) -> None:
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HarnessError(f"cannot write {output}: {error.strerror}") from error


def _print_comparison(console: Console, named: NamedComparison) -> None:
    comparison = named.comparison
    console.print(f"\n{escape(named.after)} against {escape(named.before)}: {comparison.summary}")
    for difference in comparison.differences:
        console.print(f"  differs: {escape(difference)}")
    moved = comparison.moved
    for move in moved[:_MOST_MOVES]:
        console.print(f"  {escape(str(move))}")
    if len(moved) > _MOST_MOVES:
        console.print(f"  ... and {len(moved) - _MOST_MOVES} more, all of them on the page")
    for change in comparison.changed[:_MOST_MOVES]:
        console.print(f"  {escape(change)}")
    if len(comparison.changed) > _MOST_MOVES:
        console.print(f"  ... and {len(comparison.changed) - _MOST_MOVES} more, on the page")
