"""The context that every number carries: hardware, driver, libraries, model shape."""

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch

from bcg_core import ENTRY_POINT_GROUP, ModelSpec

_LIBRARIES = (
    "breakable-cuda-graph",
    "fa3-fwd",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "gguf",
    "numpy",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "safetensors",
    "torch",
    "transformers",
    "triton",
    "xformers",
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Describe the machine and software of a run.

    Attributes:
        device: as torch calls it.
        hardware: name of GPU or CPU.
        compute_capability: of the GPU, as (major, minor).
        gpu_memory_bytes: of the GPU.
        driver: version of the GPU's driver.
        cuda: CUDA version that torch was built with.
        engine: what records the segments.
        threads: CPU threads that torch uses.
        python: version.
        platform: operating system and machine.
        libraries: installed version of each library that matters, by distribution.
    """

    device: str
    hardware: str
    compute_capability: tuple[int, int] | None
    gpu_memory_bytes: int | None
    driver: str | None
    cuda: str | None
    engine: str
    threads: int
    python: str
    platform: str
    libraries: dict[str, str]

    @classmethod
    def of(cls, device: torch.device) -> "Environment":
        """Look at this machine from the point of view of ``device``."""
        gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        return cls(
            device=str(device),
            hardware=gpu.name if gpu else _cpu_name(),
            compute_capability=(gpu.major, gpu.minor) if gpu else None,
            gpu_memory_bytes=gpu.total_memory if gpu else None,
            driver=driver_version() if gpu else None,
            cuda=torch.version.cuda,
            engine="CUDA graphs" if gpu else "CPU emulator",
            threads=torch.get_num_threads(),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            libraries=_libraries(),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [self.engine, self.hardware, f"torch {self.libraries['torch']}"]
        if self.driver:
            parts.append(f"driver {self.driver}")
        return ", ".join(parts)


def describe_model(spec: ModelSpec) -> dict[str, Any]:
    """Return the shape of a model as a JSON object."""
    return {**asdict(spec), "dtype": dtype_name(spec.dtype), "device": str(spec.device)}


def model_shape(model: Mapping[str, Any]) -> str:
    """Return in words the shape of a model that ``describe_model`` described; "?" for what a file does not say."""
    layers, width, heads, kv_heads, head_dim = (
        model.get(key, "?")
        for key in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    )
    return f"{layers} layers, D {width}, {heads}/{kv_heads} heads of {head_dim}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` without its module."""
    return str(dtype).removeprefix("torch.")


def _libraries() -> dict[str, str]:
    plugins = {p.dist.name for p in entry_points(group=ENTRY_POINT_GROUP) if p.dist is not None}
    versions = {}
    for name in sorted(plugins.union(_LIBRARIES)):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    # An installed torch knows its build ("+cpu", "+cu130") better than its distribution does.
    return {**versions, "torch": torch.__version__}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123  # no path of ours
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def driver_version() -> str | None:
    """Return the version of the GPU driver; None where nvidia-smi does not say."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None
