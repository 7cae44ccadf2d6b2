"""The adapter of torch's variable-length kernel, on stand-ins with the signatures of two releases.

Shape letters: R real tokens, S keys of all requests, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from bcg_backends.torch_varlen import TorchVarlenBackend
from bcg_backends.varlen import KeySource

MakeScene = Callable[..., Any]
Given = dict[str, Any]


class Library:
    """Stand in for ``varlen_attn``, and keep the named arguments of every call."""

    def __init__(self, math: Any) -> None:
        self.math = math
        self.calls: list[Given] = []

    def old(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Of torch 2.11."""
        return self.compute({name: given for name, given in locals().items() if name != "self"})

    def new(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Of torch 2.13."""
        if query.shape[1] != key.shape[-2] and not enable_gqa:
            raise ValueError("Expect query and key/value to have the same number of heads")
        return self.compute({name: given for name, given in locals().items() if name != "self"})

    def new_out(self, out: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Of torch 2.13, writing ``out``."""
        return out.copy_(self.new(*arguments, **options))

    def compute(self, given: Given) -> Tensor:
        self.calls.append(given)
        assert given["return_aux"] is None
        # Only these two windows are known here: everything, and everything up to the token itself.
        causal = {(-1, -1): False, (-1, 0): True}[given["window_size"]]
        options = {
            "scale": given["scale"],
            "max_new": given["max_q"],
            "max_kv": given["max_k"],
            "causal": causal,
        }
        keys = [given[name] for name in ("query", "key", "value", "cu_seq_q")]
        result: Tensor
        if given.get("block_table") is None:
            result = self.math.flat(*keys, given["cu_seq_k"], **options)
        else:
            assert given["key"].shape[1] % 256 == 0, "the kernel reads pages of multiples of 256"
            result = self.math.paged(*keys, given["seqused_k"], given["block_table"], **options)
        return result


RELEASES = ["old", "new"]


@pytest.fixture(params=RELEASES)
def library(
    request: pytest.FixtureRequest, varlen_math: Any, monkeypatch: pytest.MonkeyPatch
) -> Library:
    found = Library(varlen_math)
    kernel = getattr(found, request.param)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    monkeypatch.delattr(torch.nn.attention.varlen, "varlen_attn_out", raising=False)
    if request.param == "new":
        monkeypatch.setattr(
            torch.nn.attention.varlen, "varlen_attn_out", found.new_out, raising=False
        )
    return found


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_the_kernel_is_told_what_the_result_needs(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]], page_size: int
) -> None:
    scene = make_scene(lengths, page_size=page_size)
    assert error(scene.attend(scene.make(TorchVarlenBackend)), scene.expected()) < 1e-6


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_head_layouts_are_told(
    make_scene: MakeScene, library: Library, heads: tuple[int, int], lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, heads=heads)
    assert error(scene.attend(scene.make(TorchVarlenBackend)), scene.expected()) < 1e-6


def test_each_layer_reads_its_own_keys_and_values(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(19, 6)])
    found = scene.attend(scene.make(TorchVarlenBackend), 1)
    assert error(found, scene.expected(layer=1)) < 1e-6


def test_the_arrays_of_a_bucket_serve_as_well(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(0, 3), (40, 5)])
    backend = scene.make(TorchVarlenBackend)
    metadata = backend.update_bucket_metadata(backend.init_bucket_metadata(64), scene.batch)
    assert error(scene.attend(backend, metadata=metadata), scene.expected()) < 1e-6


@pytest.mark.parametrize(
    ("heads", "expected"), [((4, 4), False), ((8, 2), True), ((8, 1), True)], ids=str
)
@pytest.mark.parametrize("library", ["new"], indirect=True)
def test_grouped_heads_are_named_where_that_is_asked_for(
    make_scene: MakeScene, library: Library, heads: tuple[int, int], expected: bool
) -> None:
    scene = make_scene([(0, 3)], heads=heads)
    scene.attend(scene.make(TorchVarlenBackend))
    assert library.calls[0]["enable_gqa"] is expected


@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_the_window_is_causal(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths)
    scene.attend(scene.make(TorchVarlenBackend))
    assert library.calls[0]["window_size"] == (-1, 0)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_the_scale_of_the_spec_is_told(
    make_scene: MakeScene, library: Library, scale: float
) -> None:
    scene = make_scene([(0, 3)])
    scene = replace(scene, spec=replace(scene.spec, scale=scale))
    scene.attend(scene.make(TorchVarlenBackend))
    assert library.calls[0]["scale"] == scale


@pytest.mark.parametrize(
    ("library", "page_size", "source"),
    [
        ("old", 1, KeySource.GATHERED),
        ("old", 256, KeySource.GATHERED),
        ("new", 16, KeySource.GATHERED),
        ("new", 128, KeySource.GATHERED),
        ("new", 256, KeySource.PAGES),
        ("new", 512, KeySource.PAGES),
    ],
    indirect=["library"],
)
def test_pages_are_read_where_torch_can(
    make_scene: MakeScene, library: Library, page_size: int, source: KeySource
) -> None:
    scene = make_scene([(19, 6)], page_size=page_size)
    metadata = scene.make(TorchVarlenBackend).init_forward_metadata(scene.batch)
    assert metadata.source is source


def test_new_rows_are_attended_over_where_they_are(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(0, 3), (0, 2)])
    scene.attend(scene.make(TorchVarlenBackend))
    (given,) = library.calls
    found = [
        given[name] is tensor
        for name, tensor in (("query", scene.q_RNH), ("key", scene.k_RKH), ("value", scene.v_RKH))
    ]
    assert found == [True] * 3


@pytest.mark.parametrize("library", ["old"], indirect=True)
def test_out_is_left_to_the_core_where_torch_cannot_write_it(
    make_scene: MakeScene, library: Library
) -> None:
    scene = make_scene([(0, 3)])
    out = torch.full(scene.q_RNH.shape, 7.0)
    assert scene.attend(scene.make(TorchVarlenBackend), out=out) is not out
    assert (out == 7).all()


@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
@pytest.mark.parametrize("library", ["new"], indirect=True)
def test_out_is_written_where_torch_can(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=256)
    out = torch.full(scene.q_RNH.shape, 7.0)
    assert scene.attend(scene.make(TorchVarlenBackend), out=out) is out
    assert error(out, scene.expected()) < 1e-6


@pytest.mark.parametrize("library", ["new"], indirect=True)
def test_one_split_is_asked_for_where_that_is_possible(
    make_scene: MakeScene, library: Library
) -> None:
    scene = make_scene([(0, 3)])
    scene.attend(scene.make(TorchVarlenBackend))
    assert library.calls[0]["num_splits"] == 1


def test_the_kernel_is_never_told_of_a_longest_request_below_2(
    make_scene: MakeScene, library: Library
) -> None:
    scene = make_scene([(0, 1), (0, 1)])
    scene.attend(scene.make(TorchVarlenBackend))
    assert library.calls[0]["max_q"] == 2


def test_the_record_says_what_the_installed_torch_can() -> None:
    record = TorchVarlenBackend.capabilities
    installed = torch.nn.attention.varlen
    assert record.supports_out == hasattr(installed, "varlen_attn_out")
    pages = "block_table" in signature(installed.varlen_attn).parameters
    assert record.preferred_page_multiple == (256 if pages else 1)
    assert record.supports_full_graph == (pages and record.supports_out)


def test_the_installed_torch_takes_the_arguments_of_a_stand_in() -> None:
    installed = signature(torch.nn.attention.varlen.varlen_attn).parameters
    release = "new" if "enable_gqa" in installed else "old"
    stand_in = signature(getattr(Library(None), release)).parameters
    assert [name for name in installed if name in stand_in] == list(stand_in)


# Full graphs


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare full graphs, as the adapter does beside a torch that has what they need."""
    record = replace(TorchVarlenBackend.capabilities, supports_full_graph=True)
    monkeypatch.setattr(TorchVarlenBackend, "capabilities", record)


@pytest.mark.parametrize("library", ["new"], indirect=True)
def test_a_launch_made_before_the_batch_serves_it(
    make_scene: MakeScene, library: Library, declared: None, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=256)
    larger = make_scene([(300, 4), (2, 3), (0, 5), (7, 9)], page_size=256).batch
    found = scene.attend_full(scene.make(TorchVarlenBackend), 32, larger)
    assert error(found, scene.expected()) < 1e-6


@pytest.mark.parametrize(
    ("library", "page_size", "reason"),
    [
        ("old", 256, "takes no page table"),
        ("new", 16, "multiples of 256 tokens, not of 16"),
    ],
    indirect=["library"],
)
def test_a_full_graph_needs_pages_that_torch_reads(
    make_scene: MakeScene, library: Library, declared: None, page_size: int, reason: str
) -> None:
    backend = make_scene([(0, 1)], page_size=page_size).make(TorchVarlenBackend)
    assert reason in backend.refuse_full_graph()


def test_torch_alone_is_enough() -> None:
    assert TorchVarlenBackend.unavailable() is None
