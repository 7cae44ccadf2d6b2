"""What the options of the pytest plugin mean: devices, types, buckets and backends in place of text.

Apart from the plugin, which must not import torch.
"""

import re
from importlib.metadata import EntryPoint

import pytest
import torch

from bcg_core import ENTRY_POINT_GROUP, BackendRegistry, TokenBuckets
from bcg_harness.candidates import Candidate, parse_label, select_backends
from bcg_harness.cli.options import BUCKETS
from bcg_harness.errors import HarnessError
from bcg_harness.outcome import CheckResult
from bcg_harness.selection import parse_buckets, parse_device, parse_dtype

_CLASS = re.compile(r"[\w.]+:[\w.]+")


def device_of(config: pytest.Config) -> torch.device:
    """Return the device to test on; raises HarnessError where there is none such."""
    text = config.getoption("--bcg-device")
    if text == "cpu" and config.getoption("--bcg-require-cuda"):
        text = "cuda"
    return parse_device(text, option_prefix="--bcg-")


def dtype_of(config: pytest.Config) -> torch.dtype:
    """Return the element type to test with; raises HarnessError for one that is not possible."""
    return parse_dtype(config.getoption("--bcg-dtype"), device_of(config))


def buckets_of(config: pytest.Config) -> TokenBuckets:
    """Return the token counts to capture; raises BucketError or HarnessError for a ladder that makes no sense."""
    return parse_buckets(config.getoption("--bcg-buckets") or BUCKETS)


def backends_of(config: pytest.Config) -> tuple[list[Candidate], list[CheckResult]]:
    """Return the variants of backends to test, and why others cannot be: all registered ones unless some are named.

    Raises as ``select_backends`` does.
    """
    device = device_of(config)
    names: list[str] = config.getoption("--bcg-backend")
    classes: list[str] = config.getoption("--bcg-backend-class")
    usable: list[Candidate] = []
    others: list[CheckResult] = []
    if names or not classes:
        registry = BackendRegistry()
        usable, others = select_backends(
            names or registry.names(),
            registry,
            device=device,
            required=bool(names),
            option_prefix="--bcg-",
        )
    if classes:
        more, more_others = select_backends(
            classes, _registry_of(classes), device=device, required=True, option_prefix="--bcg-"
        )
        usable, others = usable + more, others + more_others
    return usable, others


def _registry_of(classes: list[str]) -> BackendRegistry:
    """Register classes under what was written for them, as if a distribution had done so."""
    values = [parse_label(text)[0] for text in classes]
    for value in values:
        if not _CLASS.fullmatch(value):
            raise HarnessError(
                f"backend class {value!r} is not of the form module:Class, such as my_kernel:MyBackend"
            )
    return BackendRegistry(
        {value: [EntryPoint(value, value, ENTRY_POINT_GROUP)] for value in values}
    )
