"""One run as the page shows it: texts, drawings and tables, ready for the template."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bcg_harness.bench.cell import NO_BACKEND, Status
from bcg_harness.bench.context import UNKNOWN, is_emulated
from bcg_harness.bench.record import BenchReport
from bcg_harness.bench.setup import ModeSetup
from bcg_harness.environment import model_shape
from bcg_harness.html.buckets import bucket_chart
from bcg_harness.html.chart import Chart
from bcg_harness.html.full_table import Gap, WorkloadTable, backend_title, gaps, workload_tables
from bcg_harness.html.headline import Headline, headline
from bcg_harness.html.heatmap import heat_map
from bcg_harness.html.latency import latency_chart
from bcg_harness.html.palette import ModeStyle
from bcg_harness.html.runs import context_line
from bcg_harness.html.setup_chart import setup_chart
from bcg_harness.html.timeline import timeline_charts
from bcg_harness.html.units import NOTHING, counted, duration, listed, ratio, size

_ABOUT = ("breakable-cuda-graph", "torch")
"""Libraries that are named at once; the rest can be unfolded."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Hold what the page says of a run.

    Attributes:
        anchor: of its links.
        title: model and hardware, and the file where that repeats.
        source: the file.
        context: all of it in a line.
        facts: label and value of what was run on what.
        libraries: installed versions.
        warnings: what a reader must know before reading numbers.
        headline: the answer.
        overhead: what a break costs, in words; empty where that is not known.
        latency: chart.
        speedup: chart.
        timelines: charts.
        buckets: chart.
        setup: chart.
        setups: rows of the table of set-ups.
        costs: rows of the table of bucket costs.
        tables: everything.
        gaps: what has no times.
        skipped: backends that could not be used, with the reason.
        notes: what backends say of themselves.
    """

    anchor: str
    title: str
    source: str
    context: str
    facts: tuple[tuple[str, str], ...]
    libraries: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    headline: Headline
    overhead: str
    latency: Chart
    speedup: Chart
    timelines: tuple[Chart, ...]
    buckets: Chart
    setup: Chart
    setups: tuple[tuple[str, ...], ...]
    costs: tuple[tuple[str, ...], ...]
    tables: tuple[WorkloadTable, ...]
    gaps: tuple[Gap, ...]
    skipped: Mapping[str, str]
    notes: Mapping[str, list[str]]

    @property
    def charts(self) -> list[Chart]:
        """Return all charts that show something."""
        charts = [self.latency, self.speedup, *self.timelines, self.buckets, self.setup]
        return [chart for chart in charts if chart.panels]

    @classmethod
    def of(
        cls, report: BenchReport, *, anchor: str, source: str, styles: dict[str, ModeStyle]
    ) -> "RunView":
        """Look at ``report``, which was read from the file ``source``."""
        hardware = report.environment.get("hardware", UNKNOWN)
        return cls(
            anchor=anchor,
            title=f"{report.model.get('name', UNKNOWN)} on {hardware}",
            source=source,
            context=context_line(report),
            facts=tuple(_facts(report)),
            libraries=tuple((name, str(version)) for name, version in report.libraries.items()),
            warnings=tuple(_warnings(report)),
            headline=headline(report),
            overhead=_overhead(report),
            latency=latency_chart(report, styles),
            speedup=heat_map(report),
            timelines=tuple(timeline_charts(report)),
            buckets=bucket_chart(report, styles),
            setup=setup_chart(report, styles),
            setups=tuple(map(_setup_row, report.setups)),
            costs=tuple(_cost_rows(report)),
            tables=tuple(workload_tables(report)),
            gaps=tuple(gaps(report)),
            skipped={**report.broken, **report.skipped},
            notes={name: lines for name, lines in report.notes.items() if lines},
        )


def _facts(report: BenchReport) -> list[tuple[str, str]]:
    environment, model = report.environment, report.model
    facts = {
        "Hardware": environment.get("hardware", UNKNOWN),
        "Engine": environment.get("engine", UNKNOWN),
        "Driver": environment.get("driver"),
        "CUDA of torch": environment.get("cuda"),
        **{name: report.libraries.get(name) for name in _ABOUT},
        "Python": environment.get("python"),
        "Model": f"{model.get('name', UNKNOWN)}: {model_shape(model)}",
        "Type": model.get("dtype", UNKNOWN),
        **{key.replace("_", " ").capitalize(): value for key, value in report.settings.items()},
        "Started": report.started.replace("T", " "),
        "Took": f"{report.seconds:.0f} s",
    }
    return [(key, _told(value)) for key, value in facts.items() if value is not None]


def _told(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _warnings(report: BenchReport) -> list[str]:
    warnings = []
    if is_emulated(report):
        warnings.append(
            "This run measured the CPU emulator. Its times say nothing of a GPU: they show that everything works, "
            "not what it gives."
        )
    if report.end:
        warnings.append(f"This run ended before its last measurement. What ended it: {report.end}")
    bad = [cell for cell in report.cells if cell.status in (Status.FAILED, Status.ERROR)]
    if bad:
        modes = listed(list(dict.fromkeys(cell.mode for cell in bad)))
        warnings.append(
            f"{counted(len(bad), 'measurement')} of {modes} failed a check or broke off, and no time of them is shown."
        )
    return warnings


def _overhead(report: BenchReport) -> str:
    overhead = report.break_overhead
    if overhead is None:
        return ""
    words = (
        f"A break that does nothing costs {duration(overhead.host_per_break)} of the host's time"
    )
    if (wall := overhead.wall_per_break) is None:
        words += ", and a replay takes no more time than one graph without it"
    else:
        words += f"; a replay takes {duration(abs(wall))} {'more' if wall > 0 else 'less'} than one graph without it"
    return f"{words} (bucket {overhead.bucket}, {overhead.breaks} breaks)."


def _setup_row(setup: ModeSetup) -> tuple[str, ...]:
    failed = "; ".join(f"{bucket}: {why}" for bucket, why in setup.failed.items())
    return (
        setup.mode,
        backend_title(setup.backend) if setup.buckets == () else _serves(setup),
        duration(setup.warm_up_seconds) if setup.warm_up_seconds else NOTHING,
        duration(setup.capture_seconds) if setup.capture_seconds else NOTHING,
        size(setup.graph_memory),
        str(len(setup.buckets)) if setup.buckets else NOTHING,
        str(setup.buckets[0].segments) if setup.buckets else NOTHING,
        failed or NOTHING,
    )


def _serves(setup: ModeSetup) -> str:
    return "all backends" if setup.backend == NO_BACKEND else setup.backend


def _cost_rows(report: BenchReport) -> list[tuple[str, ...]]:
    return [
        (
            str(cost.bucket),
            cost.backend,
            duration(cost.eager.median),
            duration(cost.replay.median),
            ratio(cost.eager.median / cost.replay.median),
            duration(cost.capture_seconds),
            size(cost.memory_bytes),
        )
        for cost in report.bucket_costs
    ]
