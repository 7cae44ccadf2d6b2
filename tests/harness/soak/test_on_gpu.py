"""A soak with real graphs: what a leak of device or pinned memory looks like, and that right backends have none."""

from collections.abc import Callable

import pytest
import torch

from bcg_backends.sdpa import SDPABackend
from bcg_core import AttentionBackend
from bcg_harness.soak.soak import Soak
from bcg_harness.testing import KeepsDeviceMemory, KeepsPinnedMemory, MaskBackend
from bcg_llama import PRESETS, random_llama

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def grown(make_soak: Callable[..., Soak]) -> Callable[..., set[str]]:
    """Return a function that soaks backends on the GPU, and returns what grew."""
    model = random_llama(PRESETS["tiny"], dtype=torch.bfloat16, device="cuda")

    def soak(*backends: type[AttentionBackend]) -> set[str]:
        run = make_soak(*backends, model=model, page_size=16)
        assert run.run().failure is None
        assert run.missing == {}
        return {each.quantity.name for each in run.samples.growths() if not each.within}

    return soak


def test_right_backends_leave_nothing_behind(grown: Callable[..., set[str]]) -> None:
    assert grown(SDPABackend, MaskBackend) == set()


def test_device_memory_that_is_kept_is_found(grown: Callable[..., set[str]]) -> None:
    assert {"device memory, live tensors", "device memory, reserved by torch"} <= grown(
        KeepsDeviceMemory
    )


def test_pinned_memory_that_is_kept_is_found(grown: Callable[..., set[str]]) -> None:
    assert "pinned host memory" in grown(KeepsPinnedMemory)
