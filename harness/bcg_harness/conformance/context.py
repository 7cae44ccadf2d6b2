"""What stands above the tests and in the report: backends found, and what they run on."""

from collections import defaultdict
from importlib.metadata import entry_points
from typing import Any

from bcg_core import ENTRY_POINT_GROUP
from bcg_harness.candidates import name_note
from bcg_harness.conformance.kit import Kit
from bcg_harness.conformance.scores import Scores
from bcg_harness.environment import Environment, dtype_name
from bcg_harness.report import CheckReport


def header(kit: Kit) -> list[str]:
    """Return lines that say which backends were found, with their versions, and what will be run on what."""
    plan = kit.plan
    backends: defaultdict[str, list[str]] = defaultdict(list)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP)):
        owner = point.dist
        backends["unknown" if owner is None else f"{owner.name} {owner.version}"].append(point.name)
    found = [f"{', '.join(names)} ({owner})" for owner, names in sorted(backends.items())]
    buckets = ", ".join(map(str, plan.buckets))
    environment = Environment.of(plan.device)
    notes = dict.fromkeys(filter(None, (name_note(candidate) for candidate, _ in plan.candidates)))
    return [
        f"bcg backends found: {'; '.join(found) or 'none'}",
        f"bcg backends to check: {', '.join(c.label for c, _ in plan.candidates) or 'none'}",
        f"bcg runs on: {environment} | {plan.model} | {dtype_name(plan.dtype)} | buckets {buckets}, pages of "
        f"{kit.page_size}{', watched by all debug tools' if plan.debug else ''}",
        *(f"bcg note: {note}" for note in notes),
    ]


def report_json(kit: Kit, scores: Scores, *, planned: int, seconds: float) -> dict[str, Any]:
    """Return the results of all tests in the form of ``bcg check --json``, and what pytest made of them.

    Raises a BcgError when there is no such model.
    """
    plan, matrix = kit.plan, kit.prepare()
    declared = {candidate.label: expectations for candidate, expectations in plan.candidates}
    results = (
        declared[result.backend].mark(result) if result.backend in declared else result
        for result in scores.results
    )
    report = CheckReport(
        environment=Environment.of(plan.device),
        model=plan.model,
        spec=matrix.model.spec,
        buckets=tuple(plan.buckets),
        settings={"page_size": kit.page_size, "seed": plan.seed, "text": None, "debug": plan.debug},
        capture=matrix.capture_report,
        cases=tuple(kit.cases.values()),
        notes=matrix.notes,
        untested=matrix.untested,
        results=tuple(results),
        expectations=tuple(declared.values()),
        seconds=seconds,
        planned=planned,
        finished=len(scores.cases),
    )
    content = report.to_json()
    # Stale patterns are among the tests, but not among the results.
    content["summary"]["green"] = scores.is_green and not report.interrupted
    content["tests"] = dict(scores.outcomes)
    return content
