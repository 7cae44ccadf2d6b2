"""What tests of backends share: requests in a paged cache, attention in float64, and stand-ins for what is installed.

Shape letters: R real tokens, B requests, P pages, W pages of a request, N query heads, K KV heads, H head dim,
Q new tokens and S keys, of one request or of all.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    AttentionSpec,
    BackendLimits,
    Chunk,
    KVSequence,
    ModelSpec,
    PagedKVCache,
    PrefillBatch,
)
from bcg_harness.testing import sequence_on


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep small work quick on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Requests whose keys and values, prefixes included, lie in a paged cache, and queries for them."""

    spec: AttentionSpec
    kv_cache: PagedKVCache
    batch: PrefillBatch
    q_RNH: Tensor
    k_RKH: Tensor
    v_RKH: Tensor

    def attend(
        self,
        backend: AttentionBackend,
        layer: int = 0,
        *,
        metadata: Any = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return what ``backend`` computes for this batch, ``[R, N, H]``; metadata defaults to the ordinary path's."""
        if metadata is None:
            metadata = backend.init_forward_metadata(self.batch)
        return backend.forward(
            self.q_RNH, self.k_RKH, self.v_RKH, self.kv_cache, layer, metadata, out
        )

    def attend_full(self, backend: AttentionBackend, bucket: int, *before: PrefillBatch) -> Tensor:
        """Return the same from a launch for a full graph of ``bucket`` rows, which was made first, after ``before``.

        Padded rows, and the new tokens' own keys and values, are NaN: they must not be read.
        """
        prepared = backend.init_bucket_metadata(bucket)
        metadata = backend.full_graph_metadata(prepared, bucket)
        for batch in (*before, self.batch):
            backend.update_bucket_metadata(prepared, batch)
        real = self.batch.num_tokens
        q_TNH, k_TKH, v_TKH = (
            torch.full((bucket, *rows.shape[1:]), float("nan"), dtype=rows.dtype)
            for rows in (self.q_RNH, self.k_RKH, self.v_RKH)
        )
        q_TNH[:real] = self.q_RNH
        out_TNH = torch.empty_like(q_TNH)
        backend.forward(q_TNH, k_TKH, v_TKH, self.kv_cache, 0, metadata, out_TNH)
        return out_TNH[:real]

    def expected(self, layer: int = 0) -> Tensor:
        """Return the same in float64, by the definition, request by request."""
        keys, values = (side.double() for side in self.kv_cache.flat(layer))
        slots = self.batch.kv_slots
        outputs = []
        for b, prefix in enumerate(self.batch.prefix_lens):
            rows = slice(self.batch.cu_new_lens[b], self.batch.cu_new_lens[b + 1])
            own = slots[self.batch.cu_kv_lens[b] : self.batch.cu_kv_lens[b + 1]]
            outputs.append(naive(self.q_RNH[rows], keys[own], values[own], prefix, self.spec))
        return torch.cat(outputs)

    def make(self, cls: type[AttentionBackend], **options: Any) -> AttentionBackend:
        limits = BackendLimits(max_tokens=1024, max_requests=64, max_context=512, num_pages=256)
        return cls(self.spec, limits, self.kv_cache.device, **options)


def naive(
    q_QNH: Tensor, keys_SKH: Tensor, values_SKH: Tensor, prefix: int, spec: AttentionSpec
) -> Tensor:
    """Attend by the definition: new token i sees the prefix and new tokens 0 to i."""
    head = torch.arange(spec.num_heads) // spec.group_size
    logits_NQS = torch.einsum("qnh,snh->nqs", q_QNH.double(), keys_SKH[:, head]) * spec.scale
    seen_QS = torch.arange(len(keys_SKH)) <= prefix + torch.arange(len(q_QNH))[:, None]
    logits_NQS = logits_NQS.masked_fill(~seen_QS.to(q_QNH.device), float("-inf"))
    return torch.einsum("nqs,snh->qnh", logits_NQS.softmax(-1), values_SKH[:, head])


@pytest.fixture
def make_scene() -> Callable[..., Scene]:
    """Return a function that lays out requests of (prefix, new) tokens with random content."""

    def make(
        lengths: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        device: str = "cpu",
        seed: int = 0,
    ) -> Scene:
        num_heads, num_kv_heads = heads
        model = ModelSpec(
            num_layers=2,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=num_heads * head_dim,
            vocab_size=10,
            max_positions=512,
            dtype=dtype,
            device=torch.device(device),
        )
        random = torch.Generator().manual_seed(seed)
        pages = sum(-(-(prefix + new) // page_size) for prefix, new in lengths)
        cache = PagedKVCache(model, num_pages=pages + 3, page_size=page_size)
        content = torch.randn(cache.storage_L2PSKH.shape, generator=random)
        cache.storage_L2PSKH.copy_(content)
        cache.storage_L2PSKH[:, :, 0] = float("nan")
        batch = PrefillBatch.from_chunks(
            [scattered(cache, prefix, new) for prefix, new in lengths], cache
        )
        keys, values = cache.flat(0)
        slots = batch.slot_mapping_R.to(device)
        fused = torch.empty(
            batch.num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device
        )
        q_RNH, k_RKH, v_RKH = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q_RNH.copy_(torch.randn(q_RNH.shape, generator=random))
        k_RKH.copy_(keys[slots])
        v_RKH.copy_(values[slots])
        return Scene(
            spec=AttentionSpec.of(model, page_size=page_size),
            kv_cache=cache,
            batch=batch,
            q_RNH=q_RNH,
            k_RKH=k_RKH,
            v_RKH=v_RKH,
        )

    return make


LENGTHS: dict[str, list[tuple[int, int]]] = {
    "one_token": [(0, 1)],
    "two_requests": [(0, 8), (0, 5)],
    "one_token_each": [(0, 1), (0, 1), (0, 1)],
    "one_token_behind_a_prefix_each": [(5, 1), (40, 1), (300, 1)],
    "a_prefix_of_one": [(1, 6)],
    "mixed": [(0, 3), (127, 1), (128, 4), (1, 1), (0, 1), (17, 8)],
}


@pytest.fixture(params=LENGTHS.values(), ids=LENGTHS)
def lengths(request: pytest.FixtureRequest) -> list[tuple[int, int]]:
    """Return (prefix, new) tokens of requests, in each of the ways that kernels take differently."""
    found: list[tuple[int, int]] = request.param
    return found


def scattered(kv_cache: PagedKVCache, prefix: int, new: int) -> Chunk:
    """Return a chunk of ``new`` tokens behind ``prefix`` cached ones, on pages that are not in order."""
    sequence = KVSequence()
    kv_cache.extend(sequence, prefix + new)
    pages = sequence.pages
    kv_cache.free(sequence)
    sequence = sequence_on(kv_cache, pages[::-1], cached=prefix)
    return Chunk(token_ids=[1] * new, sequence=sequence)


# What a vendor's kernel computes


class VarlenMath:
    """Compute what variable-length kernels compute, from the arguments that they are given and nothing else.

    They are as unforgiving as the kernels: rows of a request from ``max_new`` on are not written, keys from
    ``max_kv`` on are not seen, and index arrays are int32.
    """

    @staticmethod
    def flat(
        q_RNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        cu_new: Tensor,
        cu_kv: Tensor,
        *,
        scale: float,
        max_new: int | None = None,
        max_kv: int | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Attend over keys that are laid out request after request; unwritten rows are NaN."""
        assert {cu_new.dtype, cu_kv.dtype} == {torch.int32}, "kernels read int32"
        spec = AttentionSpec(
            num_heads=q_RNH.shape[1],
            num_kv_heads=k_SKH.shape[1],
            head_dim=q_RNH.shape[2],
            dtype=q_RNH.dtype,
            page_size=1,
            scale=scale,
        )
        result = torch.full(q_RNH.shape, float("nan"), dtype=torch.float64)
        new, kv = cu_new.tolist(), cu_kv.tolist()
        for first, end, first_key, end_key in zip(new, new[1:], kv, kv[1:], strict=False):
            keys, values = (side[first_key:end_key][:max_kv].double() for side in (k_SKH, v_SKH))
            prefix = end_key - first_key - (end - first) if causal else end_key - first_key
            rows = slice(first, end if max_new is None else min(end, first + max_new))
            result[rows] = naive(q_RNH[rows], keys, values, prefix, spec)
        return result.to(q_RNH.dtype)

    @classmethod
    def paged(
        cls,
        q_RNH: Tensor,
        keys_PSKH: Tensor,
        values_PSKH: Tensor,
        cu_new: Tensor,
        kv_lens: Tensor,
        page_table_BW: Tensor,
        **options: Any,
    ) -> Tensor:
        """Attend over pages."""
        assert {kv_lens.dtype, page_table_BW.dtype} == {torch.int32}, "kernels read int32"
        flat = [
            torch.cat(
                [
                    side[pages[: -(-length // side.shape[1])].long()].flatten(0, 1)[:length]
                    for pages, length in zip(page_table_BW, kv_lens.tolist(), strict=True)
                ]
            )
            for side in (keys_PSKH, values_PSKH)
        ]
        cu_kv = torch.nn.functional.pad(kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return cls.flat(q_RNH, *flat, cu_new, cu_kv, **options)


@pytest.fixture
def varlen_math() -> type[VarlenMath]:
    return VarlenMath


# What is installed


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Return a function that puts a module with these attributes where an import finds it."""

    def put(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes imports of these modules fail, wherever this test runs."""

    def hide(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@pytest.fixture
def install_distribution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str, str], None]:
    """Return a function that leaves the record of an installed distribution."""

    def put(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)

    return put


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    """Return a function that makes torch tell of a GPU of this compute capability, or of none."""

    def put(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return put
