"""``bcg backends``: list what is registered."""

import json
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bcg_core import BackendRegistry, Capabilities
from bcg_core.errors import PASSED_ON
from bcg_harness.candidates import Candidate, label_of, variants_of
from bcg_harness.environment import dtype_name
from bcg_harness.outcome import describe

_FLAGS = (
    "gqa",
    "cached_prefix",
    "supports_out",
    "needs_host_plan",
    "supports_full_graph",
    "deterministic",
)


def print_backends(*, as_json: bool) -> None:
    """Print every registered backend with its capabilities, or with what is missing to run it."""
    registry = BackendRegistry()
    records = [record for name in registry.names() for record in backend_records(name, registry)]
    if as_json:
        typer.echo(json.dumps(records, indent=1))
        return
    if not records:
        typer.echo("no attention backend is registered; see README.md on how to register one")
        return
    table = Table("backend", "status", "serves", padding=(0, 1), show_lines=True)
    for record in records:
        label = label_of(record["name"], record["options"])
        table.add_row(escape(label), _status(record), _serves(record))
    Console().print(table)


def backend_records(name: str, registry: BackendRegistry) -> list[dict[str, Any]]:
    """Return what is known of each variant of a backend as JSON objects; loads it, and reports a failure to."""
    try:
        backend = registry.load(name)
        found = [
            Candidate(name=name, backend=backend, options=options)
            for options in variants_of(name, backend)
        ]
        return [_record(candidate) for candidate in found]
    except PASSED_ON:
        raise
    except BaseException as error:  # noqa: BLE001  # a broken plug-in is listed as such
        broken = {"status": "broken", "reason": describe(error), "capabilities": None}
        return [{"name": name, "options": {}, **broken}]


def _record(candidate: Candidate) -> dict[str, Any]:
    missing = candidate.selected.unavailable()
    return {
        "name": candidate.name,
        "options": dict(candidate.options),
        "status": "available" if missing is None else "unavailable",
        "reason": missing,
        "capabilities": _capabilities(candidate.selected.capabilities),
    }


def _capabilities(capabilities: Capabilities) -> dict[str, Any]:
    head_dims = capabilities.head_dims
    return {
        "dtypes": sorted(map(dtype_name, capabilities.dtypes)),
        "head_dims": None if head_dims is None else sorted(head_dims),
        "page_multiple": capabilities.page_multiple,
        "devices": sorted(capabilities.devices),
        "min_compute_capability": capabilities.min_compute_capability,
        **{flag: getattr(capabilities, flag) for flag in _FLAGS},
    }


def _status(record: dict[str, Any]) -> str:
    status, reason = record["status"], record["reason"]
    style = {"available": "green", "unavailable": "yellow", "broken": "bold red"}[status]
    return f"[{style}]{status}[/]" + (f": {escape(reason)}" if reason else "")


def _serves(record: dict[str, Any]) -> str:
    found = record["capabilities"]
    if found is None:
        return ""
    oldest = found["min_compute_capability"]
    devices = ", ".join(found["devices"]) + (" from sm_{}{}".format(*oldest) if oldest else "")
    head_dims = ", ".join(map(str, found["head_dims"] or ["any"]))
    lines = [devices, ", ".join(found["dtypes"]), f"head dims {head_dims}"]
    if found["page_multiple"] > 1:
        lines.append(f"pages of multiples of {found['page_multiple']} tokens")
    return "\n".join([*lines, ", ".join(flag for flag in _FLAGS if found[flag])])
