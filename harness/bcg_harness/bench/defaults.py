"""What is measured and captured unless something else is asked for."""

from collections.abc import Sequence

import torch

from bcg_core import TokenBuckets
from bcg_harness.bench.families import CPU_WORKLOADS, DEFAULT_WORKLOADS
from bcg_harness.bench.workloads import Workload, check_fits

_CPU_BUCKETS = (16, 64, 256)
_LARGEST = 2048


def default_workloads(device: torch.device) -> Sequence[str]:
    """Return the names of the workloads for ``device``."""
    return DEFAULT_WORKLOADS if device.type == "cuda" else CPU_WORKLOADS


def fitting(
    workloads: list[Workload], max_context: int, *, chosen: bool
) -> tuple[list[Workload], dict[str, list[str]]]:
    """Leave out default workloads that are longer than the model's context, and say which.

    Raises HarnessError for one that was ``chosen`` by name.
    """
    fit = [workload for workload in workloads if chosen or workload.longest <= max_context]
    for workload in fit:
        check_fits(workload, max_context)
    names = [workload.name for workload in workloads if workload not in fit]
    note = f"left out, as the context of the model ends at {max_context}: {', '.join(names)}"
    return fit, {"workloads": [note]} if names else {}


def default_ladder(device: torch.device, max_positions: int) -> TokenBuckets:
    """Return the ladder for ``device``: up to 2048 tokens on a GPU."""
    if device.type == "cpu":
        return TokenBuckets(_CPU_BUCKETS)
    return TokenBuckets.ladder(min(_LARGEST, max_positions))
