"""Backends are found, variant by variant, or it is said why not."""

from importlib.metadata import EntryPoint

import pytest
import torch

from bcg_core import ENTRY_POINT_GROUP, BackendRegistry, UnknownBackendError
from bcg_harness import Candidate, CheckResult, Outcome, select_backends
from bcg_harness.testing import MaskBackend, NoPrefix, Variants

CPU = torch.device("cpu")
HINT = "no such library: pip install gone"


@pytest.fixture
def registry() -> BackendRegistry:
    values = {
        "broken": "no_such_module:Backend",
        "gone": "bcg_harness.testing:NotInstalled",
        "mask": "bcg_harness.testing:MaskBackend",
        "many": "bcg_harness.testing:Variants",
    }
    return BackendRegistry(
        {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    )


def labels(candidates: list[Candidate]) -> list[str]:
    return [candidate.label for candidate in candidates]


def reasons(results: list[CheckResult]) -> list[tuple[Outcome, str, str]]:
    return [(result.outcome, result.backend, result.detail) for result in results]


def test_a_missing_library_is_a_skip_with_its_hint(registry: BackendRegistry) -> None:
    usable, others = select_backends(["mask", "gone"], registry, device=CPU, required=False)
    assert labels(usable) == ["mask"]
    assert reasons(others) == [(Outcome.SKIPPED, "gone", HINT)]


def test_a_missing_library_is_an_error_when_asked_for(registry: BackendRegistry) -> None:
    _, others = select_backends(["gone"], registry, device=CPU, required=True)
    assert reasons(others) == [(Outcome.ERROR, "gone", HINT)]


def test_a_broken_entry_point_is_an_error_and_hides_nobody(registry: BackendRegistry) -> None:
    usable, others = select_backends(["broken", "mask"], registry, device=CPU, required=False)
    assert labels(usable) == ["mask"]
    assert others[0].outcome is Outcome.ERROR
    assert "no_such_module" in others[0].detail


def test_an_unknown_backend_is_refused_with_the_known_ones(registry: BackendRegistry) -> None:
    with pytest.raises(UnknownBackendError, match="broken, gone, many, mask"):
        select_backends(["mosk"], registry, device=CPU, required=True)


def test_a_backend_named_twice_is_checked_once(registry: BackendRegistry) -> None:
    usable, _ = select_backends(["mask", "mask"], registry, device=CPU, required=True)
    assert labels(usable) == ["mask"]


def test_every_variant_is_a_candidate_of_its_own(registry: BackendRegistry) -> None:
    usable, others = select_backends(["many"], registry, device=CPU, required=False)
    assert labels(usable) == ["many[version=1]", "many[version=2]"]
    assert [candidate.selected for candidate in usable] == [NoPrefix, MaskBackend]
    assert reasons(others) == [(Outcome.SKIPPED, "many[version=3]", HINT)]


def test_one_variant_is_enough_for_a_backend_that_was_asked_for(registry: BackendRegistry) -> None:
    _, others = select_backends(["many"], registry, device=CPU, required=True)
    assert reasons(others) == [(Outcome.SKIPPED, "many[version=3]", HINT)]


def test_another_kind_of_device_is_a_skip_that_names_the_limit(registry: BackendRegistry) -> None:
    meta = torch.device("meta")
    usable, others = select_backends(["mask"], registry, device=meta, required=True)
    assert usable == []
    assert reasons(others) == [(Outcome.SKIPPED, "mask", "devices: runs on cpu, cuda, not on meta")]


def test_a_label_is_the_name_where_there_are_no_options() -> None:
    assert Candidate(name="many", backend=Variants).label == "many"
