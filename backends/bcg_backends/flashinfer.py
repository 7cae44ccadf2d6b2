"""FlashInfer's prefill wrappers, planned once per batch.

Shape letters: R real tokens, B requests, W pages of a request, N query heads, K KV heads, H head dim.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from bcg_backends.vendor import import_error
from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    BackendOptionError,
    BackendUnavailableError,
    Capabilities,
    PagedKVCache,
    PrefillBatch,
)

logger = logging.getLogger(__name__)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PlanArrays:
    """Hold what a plan is made from: int32 arrays, on the host but for the page numbers.

    FlashInfer reads index arrays as int32 without checking, and copies those on the device to the host, which
    synchronises.

    Attributes:
        new_indptr: B + 1 offsets of new tokens.
        page_indptr: B + 1 offsets into ``pages``.
        pages: page numbers, request after request, on the device.
        last_page_lens: keys in each request's last page, 1 to page size.
    """

    new_indptr: Tensor
    page_indptr: Tensor
    pages: Tensor
    last_page_lens: Tensor

    @classmethod
    def of(cls, batch: PrefillBatch) -> "PlanArrays":
        """Lay out the pages of ``batch`` as FlashInfer wants them."""
        kv_lens_B = torch.tensor(batch.kv_lens, dtype=torch.int32, device="cpu")
        counts_B = (kv_lens_B + batch.page_size - 1) // batch.page_size
        used_BW = torch.arange(batch.page_table_BW.shape[1], device="cpu") < counts_B[:, None]
        return cls(
            new_indptr=torch.tensor(batch.cu_new_lens, dtype=torch.int32, device="cpu"),
            page_indptr=torch.cat(
                [
                    torch.zeros(1, dtype=torch.int32, device="cpu"),
                    counts_B.cumsum(0, dtype=torch.int32),
                ]
            ),
            pages=batch.page_table_BW[used_BW].to(batch.device),
            last_page_lens=kv_lens_B - (counts_B - 1) * batch.page_size,
        )


class PlanSlot:
    """Own a pair of wrappers, and know when their plan may be replaced.

    A plan is staged in pinned host memory and copied to the device asynchronously; FlashInfer lets the next plan
    overwrite the staging buffer before that copy ran (mini-sglang issue 103). An event after each plan guards it.
    """

    def __init__(self, paged: Any, ragged: Any) -> None:
        self.paged = paged
        self.ragged = ragged
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait on the host until the last plan has left the staging buffer."""
        if self._copied is not None:
            self._copied.synchronize()

    def planned(self) -> None:
        """Mark the plan that was just queued on the current stream."""
        self._copied = torch.cuda.Event()
        self._copied.record()


class FlashInferBackend(AttentionBackend):
    """Plan on the host once per batch, then launch one kernel a layer; option ``kernel`` is "fa2", "fa3" or "auto".

    "auto" takes fa3 on Hopper and fa2 elsewhere. Batches without cached tokens attend over the new rows in place,
    others over pages of any size. Kernels are compiled at first use, unless FlashInfer finds them prebuilt.

    Args:
        spec: what to serve.
        limits: bounds.
        device: a CUDA device.
        workspace_bytes: float workspace, shared by all plans; default follows from the shape.
        plans_in_flight: pairs of wrappers in rotation.
    """

    name = "flashinfer"
    kernel: ClassVar[str]
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16}),
        head_dims=frozenset({64, 128, 256}),
        min_compute_capability=(8, 0),
        gqa=True,
        cached_prefix=True,
        ignores_foreign_nan=True,
        supports_out=True,
        needs_host_plan=True,
        deterministic=True,
    )

    def __init__(
        self,
        spec: AttentionSpec,
        limits: BackendLimits,
        device: torch.device,
        *,
        workspace_bytes: int | None = None,
        plans_in_flight: int = 2,
    ) -> None:
        super().__init__(spec, limits, device)
        if plans_in_flight < 2:
            raise BackendOptionError(
                self.name, f"plans_in_flight is at least 2, not {plans_in_flight}"
            )
        flashinfer = import_module("flashinfer")
        workspace = torch.empty(
            workspace_bytes or self._workspace_bytes(), dtype=torch.uint8, device=device
        )
        self._slots = [
            PlanSlot(
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    workspace, "NHD", backend=self.kernel
                ),
                flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                    workspace, "NHD", backend=self.kernel
                ),
            )
            for _ in range(plans_in_flight)
        ]
        self._plans = 0

    @classmethod
    def variants(cls) -> list[dict[str, Any]]:
        """Return one set of options per kernel."""
        return [{"kernel": "fa2"}, {"kernel": "fa3"}]

    @classmethod
    def select(cls, options: Mapping[str, Any]) -> tuple[type[AttentionBackend], dict[str, Any]]:
        """Return the class of the chosen kernel, and the options left for it."""
        if cls is not FlashInferBackend:
            return cls, dict(options)
        rest = dict(options)
        kernel = rest.pop("kernel", "auto")
        if kernel == "auto":
            hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
            kernel = "fa3" if hopper else "fa2"
        kernels: dict[str, type[AttentionBackend]] = {"fa2": FlashInferFA2, "fa3": FlashInferFA3}
        if kernel not in kernels:
            raise BackendOptionError(cls.name, f"kernel is fa2, fa3 or auto, not {kernel}")
        return kernels[kernel], rest

    @classmethod
    def unavailable(cls) -> str | None:
        """Say whether FlashInfer can be imported."""
        return import_error("flashinfer", "pip install flashinfer-python")

    def _workspace_bytes(self) -> int:
        return 32 * MIB

    def warm_up(self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]) -> None:
        """Run every batch once, which compiles kernels that are not prebuilt: a minute or two for each shape.

        Raises BackendUnavailableError when they are neither prebuilt nor can be compiled here.
        """
        logger.info("%s: compiling kernels for %s unless they are prebuilt", self.name, self.spec)
        try:
            super().warm_up(batches, run)
        except torch.AcceleratorError:
            raise
        except (OSError, RuntimeError) as error:
            raise BackendUnavailableError(
                self.name,
                f"its kernels for {self.spec} are not prebuilt, and compiling them failed: {error}. Compiling needs "
                "nvcc (set CUDA_HOME) and ninja; FLASHINFER_DISABLE_JIT must not be set",
            ) from error

    def init_forward_metadata(self, batch: PrefillBatch) -> "PlannedBatch":
        """Plan ``batch`` with the next pair of wrappers."""
        slot = self._slots[self._plans % len(self._slots)]
        self._plans += 1
        slot.wait()
        arrays = PlanArrays.of(batch)
        paged = any(batch.prefix_lens)
        wrapper = slot.paged if paged else slot.ragged
        spec = self.spec
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        keys = (
            (arrays.page_indptr, arrays.pages, arrays.last_page_lens, *shape, spec.page_size)
            if paged
            else (arrays.new_indptr, *shape)
        )
        wrapper.plan(
            arrays.new_indptr,
            *keys,
            causal=True,
            sm_scale=spec.scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )
        slot.planned()
        return PlannedBatch(wrapper=wrapper, paged=paged)

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: "PlannedBatch",
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Run the planned wrapper."""
        keys = (
            ((kv_cache.keys(layer), kv_cache.values(layer)),) if metadata.paged else (k_RKH, v_RKH)
        )
        result: Tensor = metadata.wrapper.run(q_RNH, *keys, out=out_RNH)
        return result


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """Name the wrapper that was planned for a batch.

    Attributes:
        wrapper: a FlashInfer prefill wrapper.
        paged: it reads pages; otherwise the new tokens' rows.
    """

    wrapper: Any
    paged: bool


class FlashInferFA2(FlashInferBackend):
    """FlashInfer's FlashAttention-2 kernel."""

    name = "flashinfer_fa2"
    kernel = "fa2"

    def _workspace_bytes(self) -> int:
        """Hold partial results of split keys: one tile of 128 rows for each head and two blocks a multiprocessor."""
        spec = self.spec
        blocks = 2 * torch.cuda.get_device_properties(self.device).multi_processor_count
        tiles = spec.num_heads * -(-blocks // spec.num_kv_heads)
        return max(super()._workspace_bytes(), tiles * 128 * (spec.head_dim + 1) * 4 + 16 * MIB)


class FlashInferFA3(FlashInferBackend):
    """FlashInfer's FlashAttention-3 kernel, for Hopper."""

    name = "flashinfer_fa3"
    kernel = "fa3"
    capabilities = replace(FlashInferBackend.capabilities, min_compute_capability=(9, 0))

    @classmethod
    def unsupported(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Add that no later GPU has what the kernel is made of."""
        reason = super().unsupported(spec, device)
        if reason is None and torch.cuda.get_device_capability(device)[0] != 9:
            return "min_compute_capability: runs on compute capability 9.x only"
        return reason
