"""What stands above the tests and in the report: backends found, and what they run on."""

from collections import defaultdict
from importlib.metadata import entry_points
from typing import Any

from bcg_core import ENTRY_POINT_GROUP
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
    return [
        f"bcg backends found: {'; '.join(found) or 'none'}",
        f"bcg backends to check: {', '.join(c.label for c, _ in plan.candidates) or 'none'}",
        f"bcg runs on: {environment} | {plan.model} | {dtype_name(plan.dtype)} | buckets {buckets}, pages of "
        f"{kit.page_size}",
    ]


def report_json(kit: Kit, scores: Scores, *, planned: int, seconds: float) -> dict[str, Any]:
    """Return the results of all tests in the form of ``bcg check --json``, and what pytest made of them.

    Raises a BcgError when there is no such model.
    """
    plan, matrix = kit.plan, kit.prepare()
    report = CheckReport(
        environment=Environment.of(plan.device),
        model=plan.model,
        spec=matrix.model.spec,
        buckets=tuple(plan.buckets),
        settings={"page_size": kit.page_size, "seed": plan.seed, "text": None},
        capture=matrix.capture_report,
        cases=tuple(kit.cases.values()),
        notes=matrix.notes,
        results=tuple(scores.results),
        seconds=seconds,
        planned=planned,
        finished=len(scores.cases),
    )
    content = report.to_json()
    # What is expected to fail is no reason to call a run bad.
    content["summary"]["green"] = scores.is_green and not report.interrupted
    content["tests"] = dict(scores.outcomes)
    content["expected_failures"] = {
        candidate.label: {known.pattern: known.reason for known in expected}
        for candidate, expected in plan.candidates
        if expected
    }
    return content
