"""The xFormers adapter on a stand-in for xFormers, which computes from the mask and the heads that it is given.

Shape letters: R real tokens, S keys of all requests, N query heads, K KV heads, G query heads a KV head, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_backends.xformers import XFormersBackend

MakeScene = Callable[..., Any]
Gpu = Callable[[tuple[int, int] | None], None]


@dataclass
class Mask:
    """BlockDiagonalCausalFromBottomRightMask, as far as it is made from lengths."""

    new_lens: list[int]
    kv_lens: list[int]
    device: torch.device

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | None = None,
    ) -> "Mask":
        assert type(q_seqlen) is list, "xFormers takes lists"
        assert type(kv_seqlen) is list, "xFormers takes lists"
        assert isinstance(device, torch.device), "a string is not found equal to a device"
        return cls(q_seqlen, kv_seqlen, device)


class Operator:
    """The flash operator."""

    available = True

    @classmethod
    def is_available(cls) -> bool:
        return cls.available


@dataclass
class Library:
    """Stand in for ``xformers.ops.fmha``, and keep the arguments of every call."""

    math: Any
    calls: list[dict[str, Any]] = field(default_factory=list)

    def memory_efficient_attention_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Any = None,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: Any = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        assert query.ndim == key.ndim == value.ndim == 5, "grouped heads are a dimension"
        assert (query.shape[0], p) == (1, 0.0)
        assert query.shape[2:] == key.shape[2:] == value.shape[2:], "heads are not broadcast"
        new, kv = (
            torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
            for lens in (attn_bias.new_lens, attn_bias.kv_lens)
        )
        result: Tensor = self.math.flat(
            *(tensor[0].flatten(1, 2) for tensor in (query, key, value)), new, kv, scale=scale
        )
        return result.view(query.shape)


@pytest.fixture
def library(varlen_math: Any, install: Callable[..., Any]) -> Library:
    found = Library(math=varlen_math)
    install("xformers", _has_cpp_library=True)
    install(
        "xformers.ops.fmha",
        memory_efficient_attention_forward=found.memory_efficient_attention_forward,
        flash=SimpleNamespace(FwOp=Operator),
        attn_bias=SimpleNamespace(BlockDiagonalCausalFromBottomRightMask=Mask),
    )
    return found


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((actual.double() - expected).norm() / expected.norm())


# Results, from the very arguments


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_the_operator_is_given_what_the_result_needs(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]], page_size: int
) -> None:
    scene = make_scene(lengths, page_size=page_size)
    assert error(scene.attend(scene.make(XFormersBackend)), scene.expected()) < 1e-6


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_head_layouts_are_given(
    make_scene: MakeScene, library: Library, heads: tuple[int, int], lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, heads=heads)
    assert error(scene.attend(scene.make(XFormersBackend)), scene.expected()) < 1e-6


def test_each_layer_reads_its_own_keys_and_values(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(19, 6)])
    found = scene.attend(scene.make(XFormersBackend), 1)
    assert error(found, scene.expected(layer=1)) < 1e-6


def test_a_result_has_the_shape_of_the_queries(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(0, 3), (19, 6)], heads=(8, 2), dtype=torch.bfloat16)
    found = scene.attend(scene.make(XFormersBackend))
    assert (found.shape, found.dtype) == (scene.q_RNH.shape, torch.bfloat16)


def test_out_is_left_to_the_core(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(0, 3)])
    out = torch.full(scene.q_RNH.shape, 7.0)
    assert scene.attend(scene.make(XFormersBackend), out=out) is not out
    assert (out == 7).all()


def test_a_backend_that_leaves_out_to_the_core_says_so() -> None:
    assert not XFormersBackend.capabilities.supports_out


# Arguments that results do not show


def test_a_mask_is_made_from_the_lengths_of_the_batch(
    make_scene: MakeScene, library: Library
) -> None:
    scene = make_scene([(0, 3), (5, 2), (0, 1)])
    metadata = scene.make(XFormersBackend).init_forward_metadata(scene.batch)
    assert metadata.bias == Mask([3, 2, 1], [3, 7, 1], torch.device("cpu"))


def test_one_mask_serves_every_layer(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(0, 3), (5, 2)])
    backend = scene.make(XFormersBackend)
    metadata = backend.init_forward_metadata(scene.batch)
    scene.attend(backend, 0, metadata=metadata)
    scene.attend(backend, 1, metadata=metadata)
    assert [given["attn_bias"] is metadata.bias for given in library.calls] == [True, True]


@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_the_operator_is_pinned(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths)
    scene.attend(scene.make(XFormersBackend))
    assert library.calls[0]["op"] is Operator


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_the_scale_of_the_spec_is_given(
    make_scene: MakeScene, library: Library, scale: float
) -> None:
    scene = make_scene([(0, 3)])
    scene = replace(scene, spec=replace(scene.spec, scale=scale))
    scene.attend(scene.make(XFormersBackend))
    assert library.calls[0]["scale"] == scale


@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_heads_are_grouped_by_the_kv_head_they_read(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, heads=(8, 2))
    scene.attend(scene.make(XFormersBackend))
    (given,) = library.calls
    rows, keys = scene.batch.num_tokens, scene.batch.cu_kv_lens[-1]
    assert given["query"].shape == (1, rows, 2, 4, 64)
    assert given["key"].shape == given["value"].shape == (1, keys, 2, 4, 64)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_query_heads_of_a_group_share_memory(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]], side: str
) -> None:
    scene = make_scene(lengths, heads=(8, 2))
    scene.attend(scene.make(XFormersBackend))
    assert library.calls[0][side].stride()[2:] == (64, 0, 1)


def test_new_rows_are_attended_over_where_they_are(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(0, 3), (0, 2)])
    scene.attend(scene.make(XFormersBackend))
    (given,) = library.calls
    found = [given[name].data_ptr() for name in ("query", "key", "value")]
    assert found == [tensor.data_ptr() for tensor in (scene.q_RNH, scene.k_RKH, scene.v_RKH)]


@pytest.mark.parametrize(
    ("lengths", "slots"),
    [
        ([(0, 3), (0, 2)], None),
        # Pages 1; 3 and 2, in this order; 4.
        ([(0, 3), (5, 2), (0, 1)], [4, 5, 6, 12, 13, 14, 15, 8, 9, 10, 16]),
    ],
    ids=["new", "prefix"],
)
def test_rows_to_gather_against_values_by_hand(
    make_scene: MakeScene,
    library: Library,
    lengths: list[tuple[int, int]],
    slots: list[int] | None,
) -> None:
    scene = make_scene(lengths, page_size=4)
    found = scene.make(XFormersBackend).init_forward_metadata(scene.batch).slots_S
    assert (None if found is None else found.tolist()) == slots


def test_there_is_no_metadata_of_a_bucket(make_scene: MakeScene, library: Library) -> None:
    assert make_scene([(0, 3)]).make(XFormersBackend).init_bucket_metadata(8) is None


# Availability


def test_xformers_is_available_where_its_operator_is(library: Library, gpu: Gpu) -> None:
    gpu((9, 0))
    assert XFormersBackend.unavailable() is None


def test_a_missing_xformers_is_named_with_its_hint(uninstall: Callable[..., None]) -> None:
    uninstall("xformers", "xformers.ops.fmha")
    reason = XFormersBackend.unavailable()
    assert reason == "xformers.ops.fmha is not installed: pip install xformers"


def test_an_extension_without_its_cuda_runtime_is_explained(
    library: Library, gpu: Gpu, install: Callable[..., Any]
) -> None:
    gpu((9, 0))
    install("xformers", _has_cpp_library=False)
    reason = str(XFormersBackend.unavailable())
    assert reason.startswith("its CUDA extension did not load")
    assert "libcudart.so.12" in reason
    assert "install nvidia-cuda-runtime-cu12" in reason
    assert "LD_LIBRARY_PATH" in reason


def test_a_missing_operator_is_explained(
    library: Library, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0))
    monkeypatch.setattr(Operator, "available", False)
    reason = XFormersBackend.unavailable()
    assert reason == "its flash operator is not available: python -m xformers.info says why"


def test_without_a_gpu_the_device_is_what_is_missing(
    make_scene: MakeScene, library: Library, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(None)
    monkeypatch.setattr(Operator, "available", False)
    assert XFormersBackend.unavailable() is None
    spec = make_scene([(0, 1)], dtype=torch.bfloat16).spec
    reason = XFormersBackend.unsupported(spec, torch.device("cpu"))
    assert reason == "devices: runs on cuda, not on cpu"
