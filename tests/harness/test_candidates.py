"""Backends are found, variant by variant, or it is said why not."""

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bcg_core import (
    ENTRY_POINT_GROUP,
    AttentionBackend,
    BackendOptionError,
    BackendRegistry,
    Capabilities,
    UnknownBackendError,
)
from bcg_harness import Candidate, CheckResult, Outcome, select_backends
from bcg_harness.candidates import name_note
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
    assert [result.declared for result in others] == [False]


@pytest.mark.parametrize("name", ["mask", "gone"])
def test_an_option_that_is_not_taken_is_refused_installed_or_not(
    registry: BackendRegistry, name: str
) -> None:
    with pytest.raises(BackendOptionError, match=rf"'{name}': .*options \['spilts'\]"):
        select_backends([f"{name}[spilts=3]"], registry, device=CPU, required=True)


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
    assert [result.declared for result in others] == [True]
    assert reasons(others) == [
        (Outcome.SKIPPED, "mask", "devices: runs on cpu, cuda, not on meta (try --device cpu)")
    ]


def test_advice_has_the_prefix_of_the_options_at_hand(registry: BackendRegistry) -> None:
    meta = torch.device("meta")
    _, others = select_backends(
        ["mask"], registry, device=meta, required=True, option_prefix="--bcg-"
    )
    assert others[0].detail.endswith("(try --bcg-device cpu)")


class NoVariants(MaskBackend):
    name = "no-variants"

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        return []


class NamesWhatItDoesNotTake(MaskBackend):
    name = "names-what-it-does-not-take"

    @classmethod
    def variants(cls) -> Sequence[Mapping[str, Any]]:
        return [{"spilts": 3}]


class NoCapabilities(MaskBackend):
    name = "no-capabilities"
    capabilities = cast("Capabilities", {"gqa": True})


class SelectsNoCapabilities(MaskBackend):
    name = "selects-no-capabilities"

    @classmethod
    def select(cls, options: Mapping[str, Any]) -> tuple[type[AttentionBackend], dict[str, Any]]:
        return NoCapabilities, dict(options)


class StopsWhenAsked(MaskBackend):
    name = "stops-when-asked"

    @classmethod
    def unavailable(cls) -> str | None:
        pytest.skip("not on this machine")


class ExitsWhenAsked(MaskBackend):
    name = "exits-when-asked"

    @classmethod
    def unavailable(cls) -> str | None:
        sys.exit("not on this machine")


@pytest.fixture
def exits_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "bcg_test_exits_at_import.py").write_text("raise SystemExit('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "bcg_test_exits_at_import:Backend"


def with_mask(value: str) -> BackendRegistry:
    values = {"bad": value, "mask": "bcg_harness.testing:MaskBackend"}
    return BackendRegistry(
        {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    )


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (NoVariants, r"variants\(\) is empty"),
        (NamesWhatItDoesNotTake, r"options \['spilts'\]"),
        (NoCapabilities, "apabilities"),
        (SelectsNoCapabilities, "capabilities is {'gqa': True}"),
        (ExitsWhenAsked, "SystemExit: not on this machine"),
        (StopsWhenAsked, "Skipped: not on this machine"),
    ],
)
def test_a_broken_plug_in_is_an_error_and_hides_nobody(
    backend: type[AttentionBackend], message: str
) -> None:
    registry = with_mask(f"{__name__}:{backend.__name__}")
    usable, others = select_backends(["bad", "mask"], registry, device=CPU, required=False)
    assert labels(usable) == ["mask"]
    assert [result.outcome for result in others] == [Outcome.ERROR]
    assert re.search(message, others[0].detail)
    assert others[0].traceback


def test_an_exit_at_import_is_an_error_and_hides_nobody(exits_at_import: str) -> None:
    registry = with_mask(exits_at_import)
    usable, others = select_backends(["bad", "mask"], registry, device=CPU, required=False)
    assert labels(usable) == ["mask"]
    assert [result.outcome for result in others] == [Outcome.ERROR]


def test_a_registered_name_that_is_no_label_is_an_error_and_hides_nobody() -> None:
    values = dict.fromkeys(["odd name/[x]", "mask"], "bcg_harness.testing:MaskBackend")
    registry = BackendRegistry(
        {name: [EntryPoint(name, value, ENTRY_POINT_GROUP)] for name, value in values.items()}
    )
    usable, others = select_backends(registry.names(), registry, device=CPU, required=False)
    assert labels(usable) == ["mask"]
    assert [(result.outcome, result.backend) for result in others] == [
        (Outcome.ERROR, "odd name/[x]")
    ]
    assert "needs another name" in others[0].detail


def test_a_class_with_another_name_than_it_is_registered_under_is_noted() -> None:
    note = name_note(Candidate(name="other", backend=MaskBackend))
    assert note is not None
    assert "registered as 'other', but its class has name = 'mask'" in note


@pytest.mark.parametrize("name", ["mask", "my_module:MaskBackend"], ids=["same", "unregistered"])
def test_there_is_nothing_to_note_of_other_names(name: str) -> None:
    assert name_note(Candidate(name=name, backend=MaskBackend)) is None


def test_a_label_is_the_name_where_there_are_no_options() -> None:
    assert Candidate(name="many", backend=Variants).label == "many"
