"""Capabilities: every limit refuses by its name, and every default is the cautious answer."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from bcg_core import AttentionSpec, Capabilities, ModelSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32, page_size=16, scale=0.125
)
EVERYTHING = Capabilities(
    dtypes=frozenset({torch.float32, torch.bfloat16}),
    head_dims=frozenset({64, 128}),
    page_multiple=16,
    devices=frozenset({"cpu", "cuda"}),
    gqa=True,
)


def test_a_spec_within_all_limits_is_not_refused() -> None:
    assert EVERYTHING.refuse(SPEC, CPU) is None


LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], torch.device, str]] = {
    "devices": ({"devices": frozenset({"cuda"})}, {}, CPU, "devices: runs on cuda, not on cpu"),
    "several_devices": (
        {},
        {},
        torch.device("mps"),
        "devices: runs on cpu, cuda, not on mps",
    ),
    "dtypes": ({}, {"dtype": torch.float16}, CPU, "dtypes: takes bfloat16, float32, not float16"),
    "head_dims": ({}, {"head_dim": 80}, CPU, "head_dims: takes [64, 128], not 80"),
    "page_multiple": ({}, {"page_size": 24}, CPU, "page_multiple: takes multiples of 16, not 24"),
    "gqa": (
        {"gqa": False},
        {},
        CPU,
        "gqa: takes as many KV heads as query heads, not 2 for 8",
    ),
}


@pytest.mark.parametrize(("limit", "spec", "device", "message"), LIMITS.values(), ids=LIMITS)
def test_a_limit_that_is_exceeded_is_named(
    limit: dict[str, Any], spec: dict[str, Any], device: torch.device, message: str
) -> None:
    assert replace(EVERYTHING, **limit).refuse(replace(SPEC, **spec), device) == message


@pytest.mark.parametrize(
    ("limit", "spec"),
    [
        ({"head_dims": None}, {"head_dim": 80}),
        ({"gqa": False}, {"num_kv_heads": 8}),
        ({"page_multiple": 1}, {"page_size": 7}),
        ({}, {"page_size": 32}),
        ({}, {"dtype": torch.bfloat16}),
    ],
    ids=["any_head_dim", "no_groups", "any_page_size", "page_size_multiple", "other_dtype"],
)
def test_a_spec_at_a_limit_is_not_refused(limit: dict[str, Any], spec: dict[str, Any]) -> None:
    assert replace(EVERYTHING, **limit).refuse(replace(SPEC, **spec), CPU) is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((8, 0), "min_compute_capability: needs (9, 0), this GPU has (8, 0)"),
        ((8, 9), "min_compute_capability: needs (9, 0), this GPU has (8, 9)"),
        ((9, 0), None),
        ((10, 0), None),
    ],
    ids=str,
)
def test_a_gpu_that_is_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    assert replace(EVERYTHING, min_compute_capability=(9, 0)).refuse(SPEC, CUDA) == reason


def test_a_cpu_has_no_compute_capability() -> None:
    assert replace(EVERYTHING, min_compute_capability=(9, 0)).refuse(SPEC, CPU) is None


@pytest.mark.parametrize(
    "flag",
    [
        "gqa",
        "cached_prefix",
        "supports_out",
        "supports_full_graph",
        "deterministic",
    ],
)
def test_a_capability_that_is_not_declared_is_absent(flag: str) -> None:
    assert getattr(Capabilities(), flag) is False


def test_planning_on_the_host_is_assumed_unless_denied() -> None:
    assert Capabilities().needs_host_plan is True


def test_a_record_that_declares_nothing_takes_16_bit_heads_of_common_size_on_cuda() -> None:
    capabilities = Capabilities()
    assert capabilities.devices == {"cuda"}
    assert capabilities.dtypes == {torch.float16, torch.bfloat16}
    assert capabilities.head_dims == {64, 128}


def test_a_record_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Capabilities().gqa = True  # type: ignore[misc]


# Specs


def test_attention_of_a_model_takes_its_shapes() -> None:
    model = ModelSpec(
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        hidden_size=512,
        vocab_size=100,
        max_positions=64,
        dtype=torch.float32,
        device=CPU,
    )
    assert AttentionSpec.of(model, page_size=16) == SPEC


def test_a_group_is_the_query_heads_of_a_kv_head() -> None:
    assert SPEC.group_size == 4
