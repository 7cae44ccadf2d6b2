"""Which engine records for which device."""

import pytest
import torch

from bcg_core import CPUSegmentEngine, CUDASegmentEngine, engine_for


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")], ids=str)
def test_a_cpu_has_the_emulator(device: str | torch.device) -> None:
    assert isinstance(engine_for(device), CPUSegmentEngine)


def test_every_call_makes_an_engine_of_its_own() -> None:
    assert engine_for("cpu") is not engine_for("cpu")


@pytest.mark.parametrize("device", ["mps", "meta", "xpu:1"])
def test_other_devices_have_no_engine(device: str) -> None:
    with pytest.raises(
        ValueError, match=f"no segment engine for device '{device}'; use 'cuda' or 'cpu'"
    ):
        engine_for(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_a_gpu_is_refused_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU: install a CUDA build of torch"):
        engine_for(device)


def test_the_cuda_engine_itself_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="or use device 'cpu' for the emulator"):
        CUDASegmentEngine()
