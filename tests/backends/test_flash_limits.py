"""What adapters refuse whose kernels are of FlashAttention 2's lineage: asked of the class, without its library."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bcg_backends.torch_varlen import TorchVarlenBackend
from bcg_backends.xformers import XFormersBackend
from bcg_core import AttentionBackend, AttentionSpec

Gpu = Callable[[tuple[int, int] | None], None]

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, page_size=16, scale=0.125
)
CUDA = torch.device("cuda")


@pytest.fixture(params=[TorchVarlenBackend, XFormersBackend])
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    found: type[AttentionBackend] = request.param
    return found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 8}, None),
        ({"head_dim": 256}, None),
        ({"page_size": 7}, None),
        ({"dtype": torch.float16}, None),
        ({"head_dim": 20}, "head_dims: takes multiples of 8 up to 256, not 20"),
        ({"head_dim": 264}, "head_dims: takes multiples of 8 up to 256, not 264"),
        ({"dtype": torch.float32}, "dtypes: takes bfloat16, float16, not float32"),
    ],
    ids=str,
)
def test_declared_limits_are_kept(
    gpu: Gpu, backend: type[AttentionBackend], changes: dict[str, Any], reason: str | None
) -> None:
    gpu((9, 0))
    assert backend.unsupported(replace(SPEC, **changes), CUDA) == reason


def test_the_cpu_is_refused(backend: type[AttentionBackend]) -> None:
    reason = backend.unsupported(SPEC, torch.device("cpu"))
    assert reason == "devices: runs on cuda, not on cpu"


def test_old_gpus_are_refused(gpu: Gpu, backend: type[AttentionBackend]) -> None:
    gpu((7, 5))
    reason = backend.unsupported(SPEC, CUDA)
    assert reason == "min_compute_capability: needs (8, 0), this GPU has (7, 5)"
