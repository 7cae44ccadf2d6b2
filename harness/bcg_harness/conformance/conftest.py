"""Hooks and fixtures of the conformance kit; loaded with it, and with nothing else."""

from collections.abc import Generator
from time import perf_counter

import pytest

from bcg_core import BcgError
from bcg_harness.conformance.context import header, report_json
from bcg_harness.conformance.kit import Kit
from bcg_harness.conformance.plan import Plan
from bcg_harness.conformance.scores import Scores
from bcg_harness.conformance.subjects import CheckOfCase, Subject
from bcg_harness.conformance.verdict import Verdict
from bcg_harness.json_file import write_json
from bcg_harness.outcome import Outcome
from bcg_harness.pytest_plugin import DISTRIBUTED, is_distributed, usage_errors

_KIT = pytest.StashKey[Kit]()
_SCORES = pytest.StashKey[Scores]()
_VERDICT = pytest.StashKey[Verdict]()
_REPORTED = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest list the reasons of skips and expected failures unless told otherwise."""
    config.stash[_SCORES] = Scores()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.getoption("reportchars") == "fE":  # pytest's default
        reporter.reportchars += "xXs"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every subject; those that are declared to fail are marked."""
    if "verdict" in metafunc.fixturenames:
        if is_distributed(metafunc.config):  # and the kit is not named, but found in a folder
            pytest.fail(DISTRIBUTED, pytrace=False)
        with usage_errors():
            kit = metafunc.config.stash[_KIT] = Kit(Plan.of(metafunc.config))
        subjects = kit.plan.subjects()
        parameters = [pytest.param(s, id=s.id, marks=_marks(s)) for s in subjects]
        metafunc.parametrize("verdict", parameters, indirect=True)


def _marks(subject: Subject) -> list[pytest.MarkDecorator]:
    if subject.expected is None:
        return []
    # Strict pattern by pattern: one that no longer fails at all fails its own test.
    return [pytest.mark.xfail(reason=subject.expected.reason, strict=False)]


def _subject(item: pytest.Item) -> Subject | None:
    subject = getattr(getattr(item, "callspec", None), "params", {}).get("verdict")
    return subject if isinstance(subject, Subject) else None


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say what was found; pytest's own header is written before this file is."""
    kit = config.stash.get(_KIT, None)
    return [] if kit is None else header(kit)


def pytest_runtestloop(session: pytest.Session) -> None:
    """Make the model before the first test, so that a model that does not exist is told once."""
    if session.config.option.collectonly:
        return
    if any(isinstance(_subject(item), CheckOfCase) for item in session.items):
        try:
            session.config.stash[_KIT].prepare()
        except BcgError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Verdict:
    """Return what becomes of this test; a skip skips it, and what could not be judged is an error."""
    kit, scores = request.config.stash[_KIT], request.config.stash[_SCORES]
    judged: Verdict = request.param.judge(kit)
    request.node.stash[_VERDICT] = judged
    if judged.outcome is Outcome.SKIPPED:
        pytest.skip(judged.reason)
    if judged.outcome is Outcome.ERROR:
        broken, subject = judged.broken_backend, request.param
        told_by = None if broken is None else scores.broken.get(broken)
        # What is expected to fail is said to have failed; a test that is run again says it all again.
        if subject.expected is None and told_by not in (None, subject.id):
            pytest.skip(f"{broken} cannot be used, see {told_by}")
        reason, _, rest = judged.reason.partition("\n")
        told = any(map(scores.knows, judged.results))
        pytest.fail(f"{reason} (as above)" if told and rest else judged.reason, pytrace=False)
    return judged


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count what became of the test."""
    report = yield
    subject = _subject(item)
    if subject is not None:
        item.config.stash[_SCORES].add(subject, item.stash.get(_VERDICT, None), report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run in which every test was skipped, and write the report."""
    config = session.config
    kit, scores = config.stash.get(_KIT, None), config.stash[_SCORES]
    if kit is None or not scores.outcomes:
        return
    if exitstatus == pytest.ExitCode.OK and scores.nothing_checked:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if kit.plan.report is None:
        return
    planned = {s.place for s in map(_subject, session.items) if isinstance(s, CheckOfCase)}
    seconds = perf_counter() - kit.started
    try:
        write_json(report_json(kit, scores, planned=len(planned), seconds=seconds), kit.plan.report)
        config.stash[_REPORTED] = f"written to {kit.plan.report}"
    except BcgError as error:
        config.stash[_REPORTED] = f"no report: {error}"
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how much was checked on what, and how much was not."""
    scores = config.stash[_SCORES]
    if not scores.outcomes:
        return
    kit = config.stash[_KIT]
    for line in scores.lines(kit.plan.device):
        terminalreporter.write_line(line, red=scores.nothing_checked)
    for label, untested in kit.untested.items():
        terminalreporter.write_line(f"bcg conformance: {label}: {untested}")
    if (reported := config.stash.get(_REPORTED, None)) is not None:
        terminalreporter.write_line(f"bcg conformance: {reported}")
