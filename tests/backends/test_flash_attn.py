"""The FlashAttention adapters, each on a stand-in for its library.

A stand-in takes arguments the way the library does, refuses what the library refuses, and computes from what it was
given: a wrong argument gives a wrong result, or none.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bcg_backends.flash_attn import FlashAttentionBackend
from bcg_backends.flash_attn_2 import FlashAttention2
from bcg_backends.flash_attn_3 import FlashAttention3
from bcg_backends.flash_attn_4 import FlashAttention4
from bcg_backends.varlen import KeySource
from bcg_core import AttentionSpec, BackendLimits, BackendOptionError, UnsupportedSpecError
from bcg_core.registry import create_backend

MakeScene = Callable[..., Any]
Given = dict[str, Any]

MODULES = (
    "flash_attn_2_cuda",
    "flash_attn_interface",
    "fa3_fwd_interface",
    "flash_attn.cute.interface",
)


# The libraries


@dataclass(kw_only=True)
class Library:
    """Stand in for one version, and keep the named arguments of every call."""

    backend: ClassVar[type[FlashAttentionBackend]]
    page_tokens: ClassVar[int]
    math: Any
    calls: list[Given] = field(default_factory=list)

    def lengths(self, given: Given) -> dict[str, Any]:
        return {
            "scale": given["softmax_scale"],
            "max_new": given["max_seqlen_q"],
            "max_kv": given["max_seqlen_k"],
        }

    def compute(
        self, given: Given, page_table: Tensor | None, kv_lens: Tensor | None, *, causal: bool
    ) -> Tensor:
        """Write the result where it was asked for, and return it."""
        keys = (given["q"], given["k"], given["v"], given["cu_seqlens_q"])
        options = self.lengths(given) | {"causal": causal}
        if page_table is None:
            result = self.math.flat(*keys, given["cu_seqlens_k"], **options)
        else:
            result = self.math.paged(*keys, kv_lens, page_table, **options)
        return result if given["out"] is None else given["out"].copy_(result)


class Library2(Library):
    """flash_attn_2_cuda of flash-attn 2.8.3."""

    backend = FlashAttention2
    page_tokens = 256

    def varlen_fwd(  # one argument a line, as in the library
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_k: Tensor | None,
        leftpad_k: Tensor | None,
        block_table: Tensor | None,
        alibi_slopes: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        p_dropout: float,
        softmax_scale: float,
        zero_tensors: bool,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        return_softmax: bool,
        gen: Any,
        /,
    ) -> list[Any]:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(given)
        if block_table is not None and k.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        if max_seqlen_q == 1 and q.shape[1] > k.shape[2 if block_table is not None else 1]:
            given = given | {"out": None}
        kv_lens = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        result = self.compute(given, block_table, kv_lens, causal=is_causal)
        return [result, None, None, None]


# The operator's schema in fa3-fwd 0.0.3, and in flash-attention's hopper folder.
SCHEMA_3 = """(
    Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None,
    Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None,
    Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,
    Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,
    Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None,
    Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,
    int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False,
    Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0
) -> (Tensor(out!), Tensor, Tensor, Tensor)"""


@dataclass(kw_only=True)
class Library3(Library):
    """The operator of version 3, in a build that reads pages by bulk tensor copies alone."""

    backend = FlashAttention3
    page_tokens = 128
    query_blocks: ClassVar[Mapping[int, int]] = {64: 192, 96: 192, 128: 128}
    key_blocks: ClassVar[Mapping[int, int]] = {64: 128, 96: 144, 128: 128}

    namespace: str = "fa3_fwd"

    def fwd(self, *arguments: Any) -> tuple[Tensor, ...]:
        declared = getattr(torch.ops, self.namespace).fwd.default._schema.arguments
        given: Given = {argument.name: argument.default_value for argument in declared}
        # The dispatcher leaves trailing defaults out.
        given |= {known.name: value for known, value in zip(declared, arguments, strict=False)}
        self.calls.append(given)
        q, k, pages = given["q"], given["k"], given["page_table"]
        head_dim = q.shape[2]
        if pages is not None:
            if given["cu_seqlens_k"] is not None:
                raise RuntimeError("If cu_seqlens_k is passed in, then page table is not supported")
            rows = given["max_seqlen_q"] * q.shape[1] // k.shape[2]
            if k.shape[1] % self.key_blocks[head_dim] or rows <= self.query_blocks[head_dim]:
                raise RuntimeError("This flash attention build does not support paged KV")
        causal = given["is_causal"] and given["max_seqlen_q"] != 1
        result = self.compute(given, pages, given["seqused_k"], causal=causal)
        return result, torch.empty(0), torch.empty(0), torch.empty(0)


class Library4(Library):
    """flash_attn.cute.interface of flash-attn-4 4.0.0b36."""

    backend = FlashAttention4
    page_tokens = 16

    def fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        return_lse: bool = False,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Any, ...]:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(given)
        assert page_table is None or cu_seqlens_k is None, "page_table excludes cu_seqlens_k"
        result = self.compute(given, page_table, seqused_k, causal=causal)
        return result, None, None, None, None


@pytest.fixture
def absent(uninstall: Callable[..., None]) -> None:
    uninstall(*MODULES)


@pytest.fixture
def version_2(
    absent: None, varlen_math: Any, install: Callable[..., Any]
) -> Callable[[], Library2]:
    def put() -> Library2:
        library = Library2(math=varlen_math)
        install("flash_attn_2_cuda", varlen_fwd=library.varlen_fwd)
        return library

    return put


@pytest.fixture
def version_3(
    absent: None, varlen_math: Any, install: Callable[..., Any]
) -> Iterator[Callable[..., Library3]]:
    with ExitStack() as stack:

        def put(module: str = "fa3_fwd_interface", namespace: str = "fa3_fwd") -> Library3:
            if hasattr(getattr(torch.ops, namespace), "fwd"):
                pytest.skip(f"the library itself is loaded: torch.ops.{namespace} is taken")
            library = Library3(math=varlen_math, namespace=namespace)
            operators = stack.enter_context(torch.library._scoped_library(namespace, "FRAGMENT"))
            operators.define("fwd" + SCHEMA_3)
            operators.impl("fwd", library.fwd, "CPU")
            install(module)
            return library

        yield put


@pytest.fixture
def version_4(
    absent: None,
    varlen_math: Any,
    install: Callable[..., Any],
    install_distribution: Callable[[str, str], None],
) -> Callable[[], Library4]:
    def put() -> Library4:
        library = Library4(math=varlen_math)
        install("flash_attn.cute.interface", _flash_attn_fwd=library.fwd)
        install_distribution("flash-attn-4", "4.0.0b36")
        return library

    return put


VERSIONS = ["version_2", "version_3", "version_4"]


@pytest.fixture
def install_versions(
    version_2: Any, version_3: Any, version_4: Any
) -> Callable[[tuple[int, ...]], None]:
    def put(versions: tuple[int, ...]) -> None:
        for version in versions:
            {2: version_2, 3: version_3, 4: version_4}[version]()

    return put


@pytest.fixture(params=VERSIONS)
def library(request: pytest.FixtureRequest) -> Library:
    found: Library = request.getfixturevalue(request.param)()
    return found


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((actual.double() - expected).norm() / expected.norm())


# Results, from the very arguments


@pytest.mark.parametrize("page_size", [16, 128, 256])
def test_kernels_are_told_what_the_result_needs(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]], page_size: int
) -> None:
    scene = make_scene(lengths, page_size=page_size)
    out = torch.full(scene.q_RNH.shape, float("nan"))
    scene.attend(scene.make(library.backend), out=out)
    assert error(out, scene.expected()) < 1e-6


@pytest.mark.parametrize("page_size", [16, 256])
def test_each_layer_reads_its_own_keys_and_values(
    make_scene: MakeScene, library: Library, page_size: int
) -> None:
    scene = make_scene([(19, 6)], page_size=page_size)
    out = torch.empty(scene.q_RNH.shape)
    scene.attend(scene.make(library.backend), 1, out=out)
    assert error(out, scene.expected(layer=1)) < 1e-6


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_head_layouts_are_told(
    make_scene: MakeScene, library: Library, heads: tuple[int, int], head_dim: int, page_size: int
) -> None:
    scene = make_scene([(0, 2), (19, 1)], heads=heads, head_dim=head_dim, page_size=page_size)
    out = torch.empty(scene.q_RNH.shape)
    scene.attend(scene.make(library.backend), out=out)
    assert error(out, scene.expected()) < 1e-6


@pytest.mark.parametrize("lengths", [[(0, 3), (0, 5)], [(0, 3), (40, 5)]], ids=["new", "prefix"])
def test_the_arrays_of_a_bucket_serve_as_well(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=256)
    backend = scene.make(library.backend)
    metadata = backend.update_bucket_metadata(backend.init_bucket_metadata(64), scene.batch)
    out = torch.empty(scene.q_RNH.shape)
    scene.attend(backend, metadata=metadata, out=out)
    assert error(out, scene.expected()) < 1e-6


@pytest.mark.parametrize("lengths", [[(0, 3)], [(40, 5)], [(40, 1)]], ids=["new", "prefix", "one"])
def test_out_is_written_and_returned(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=256)
    out = torch.empty(scene.q_RNH.shape)
    assert scene.attend(scene.make(library.backend), out=out).data_ptr() == out.data_ptr()
    assert library.calls[0]["out"].data_ptr() == out.data_ptr()


def test_a_result_without_out_is_new(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(0, 3)])
    assert error(scene.attend(scene.make(library.backend)), scene.expected()) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_the_scale_of_the_spec_is_told(
    make_scene: MakeScene, library: Library, scale: float
) -> None:
    scene = make_scene([(0, 3), (40, 5)], page_size=256)
    scene = replace(scene, spec=replace(scene.spec, scale=scale))
    scene.attend(scene.make(library.backend))
    assert library.calls[0]["softmax_scale"] == scale


# Full graphs


def test_a_launch_made_before_the_batch_serves_it(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=256)
    assert error(scene.attend_full(scene.make(library.backend), 32), scene.expected()) < 1e-6


@pytest.mark.parametrize("lengths", [[(0, 3)], [(40, 1)]], ids=["new", "prefix"])
def test_what_a_larger_batch_left_in_dead_slots_does_no_harm(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=256)
    larger = make_scene([(300, 4), (2, 3), (0, 5), (7, 9)], page_size=256).batch
    found = scene.attend_full(scene.make(library.backend), 32, larger)
    assert error(found, scene.expected()) < 1e-6


def test_a_bucket_of_one_token_has_a_full_graph(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(19, 1)], page_size=256)
    assert error(scene.attend_full(scene.make(library.backend), 1), scene.expected()) < 1e-6


def test_a_full_graph_is_declared(library: Library) -> None:
    assert library.backend.capabilities.supports_full_graph


@pytest.mark.parametrize(
    ("version", "head_dim", "page_size", "reason"),
    [
        ("version_2", 64, 16, "multiples of 256 tokens, not of 16"),
        ("version_2", 96, 256, None),
        ("version_3", 64, 16, "multiples of 128 tokens, not of 16"),
        ("version_3", 64, 128, None),
        ("version_3", 96, 128, r"head dims \[64, 128\], not 96"),
        ("version_4", 64, 16, None),
        ("version_4", 96, 128, r"head dims \[64, 128\], not 96"),
    ],
)
def test_a_full_graph_needs_pages_that_the_kernel_reads(
    make_scene: MakeScene,
    request: pytest.FixtureRequest,
    version: str,
    head_dim: int,
    page_size: int,
    reason: str | None,
) -> None:
    library = request.getfixturevalue(version)()
    backend = make_scene([(0, 1)], head_dim=head_dim, page_size=page_size).make(library.backend)
    refusal = backend.refuse_full_graph()
    assert refusal is None if reason is None else re.search(reason, refusal)


# What a stand-in refuses, so that the results above mean something


def test_the_stand_in_for_2_leaves_out_unwritten_when_told_of_one_token(
    make_scene: MakeScene, version_2: Callable[[], Library2], monkeypatch: pytest.MonkeyPatch
) -> None:
    version_2()
    scene = make_scene([(40, 1)], page_size=256)
    monkeypatch.setattr("bcg_backends.flash_attn_2.max", lambda first, second: first, raising=False)
    out = torch.full(scene.q_RNH.shape, float("nan"))
    scene.attend(scene.make(FlashAttention2), out=out)
    assert out.isnan().all()


def test_the_stand_in_for_3_refuses_pages_when_told_of_few_tokens(
    make_scene: MakeScene, version_3: Callable[[], Library3], monkeypatch: pytest.MonkeyPatch
) -> None:
    version_3()
    monkeypatch.setattr(FlashAttention3, "query_blocks", {})
    scene = make_scene([(40, 1)], page_size=128)
    with pytest.raises(RuntimeError, match="does not support paged KV"):
        scene.attend(scene.make(FlashAttention3))


@pytest.mark.parametrize("version", ["version_2", "version_3"])
def test_the_stand_ins_refuse_pages_of_other_sizes(
    make_scene: MakeScene,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    library = request.getfixturevalue(version)()
    monkeypatch.setattr(library.backend, "refuse_pages", classmethod(lambda cls, spec: None))
    scene = make_scene([(40, 1)], page_size=16)
    with pytest.raises(RuntimeError, match=r"divisible by 256|does not support paged KV"):
        scene.attend(scene.make(library.backend))


# Arguments that results do not show

NEITHER = {
    "version_2": {
        "seqused_k": None,
        "leftpad_k": None,
        "alibi_slopes": None,
        "p_dropout": 0.0,
        "zero_tensors": False,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "return_softmax": False,
        "gen": None,
    },
    "version_3": {
        "k_new": None,
        "v_new": None,
        "q_v": None,
        "cu_seqlens_k_new": None,
        "seqused_q": None,
        "kv_batch_idx": None,
        "leftpad_k": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "seqlens_rotary": None,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "is_causal": True,
        "window_size_left": -1,
        "window_size_right": -1,
        "attention_chunk": 0,
        "softcap": 0.0,
        "is_rotary_interleaved": False,
        "scheduler_metadata": None,
        "num_splits": 1,
        "pack_gqa": None,
        "sm_margin": 0,
    },
    "version_4": {
        "qv": None,
        "seqused_q": None,
        "causal": True,
        "softcap": None,
        "window_size_left": None,
        "window_size_right": None,
        "num_splits": 1,
        "return_lse": False,
        "lse": None,
    },
}


@pytest.mark.parametrize("lengths", [[(0, 3)], [(40, 5)]], ids=["new", "prefix"])
@pytest.mark.parametrize("version", VERSIONS)
def test_everything_else_is_off_and_keys_are_not_split(
    make_scene: MakeScene,
    request: pytest.FixtureRequest,
    version: str,
    lengths: list[tuple[int, int]],
) -> None:
    library = request.getfixturevalue(version)()
    scene = make_scene(lengths, page_size=256)
    scene.attend(scene.make(library.backend))
    (given,) = library.calls
    assert {name: given[name] for name in NEITHER[version]} == NEITHER[version]


TABLE = {"version_2": "block_table", "version_3": "page_table", "version_4": "page_table"}


@pytest.mark.parametrize("version", VERSIONS)
def test_pages_are_named_by_the_page_table_of_the_batch(
    make_scene: MakeScene, request: pytest.FixtureRequest, version: str
) -> None:
    library = request.getfixturevalue(version)()
    scene = make_scene([(0, 3), (300, 5)], page_size=256)
    scene.attend(scene.make(library.backend), 1)
    (given,) = library.calls
    assert given[TABLE[version]].tolist() == [[1, 0], [3, 2]]
    assert given["k"].data_ptr() == scene.kv_cache.keys(1).data_ptr()
    assert given["v"].data_ptr() == scene.kv_cache.values(1).data_ptr()


@pytest.mark.parametrize("version", VERSIONS)
def test_flat_keys_have_no_page_table(
    make_scene: MakeScene, request: pytest.FixtureRequest, version: str
) -> None:
    library = request.getfixturevalue(version)()
    scene = make_scene([(0, 3), (0, 5)], page_size=256)
    scene.attend(scene.make(library.backend))
    (given,) = library.calls
    assert given[TABLE[version]] is None
    assert given["cu_seqlens_k"].tolist() == [0, 3, 8]
    assert given["k"].data_ptr() == scene.k_RKH.data_ptr()
    assert given["v"].data_ptr() == scene.v_RKH.data_ptr()


def told_of(scene: Any, library: Library) -> list[int]:
    """Return the longest runs of new tokens and of keys that the kernel is told of."""
    scene.attend(scene.make(library.backend))
    return [library.calls[-1]["max_seqlen_q"], library.calls[-1]["max_seqlen_k"]]


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(0, 1)], [2, 1]),
        ([(300, 1), (5, 1)], [2, 301]),
        ([(0, 2)], [2, 2]),
        ([(7, 30), (300, 4)], [30, 304]),
    ],
    ids=str,
)
def test_version_2_is_never_told_of_a_single_new_token(
    make_scene: MakeScene,
    version_2: Callable[[], Library2],
    lengths: list[tuple[int, int]],
    expected: list[int],
    page_size: int,
) -> None:
    assert told_of(make_scene(lengths, page_size=page_size), version_2()) == expected


@pytest.mark.parametrize(
    ("head_dim", "heads", "least"),
    [
        # More than a block of 192 query rows for 64 elements, of 128 for 128; a row is a token and a head of a group.
        (64, (4, 4), 193),
        (64, (8, 2), 49),
        (64, (8, 1), 25),
        (64, (9, 3), 65),
        (128, (4, 4), 129),
        (128, (8, 2), 33),
        (128, (8, 1), 17),
        (128, (9, 3), 43),
    ],
    ids=str,
)
def test_version_3_is_told_of_more_than_one_query_block(
    make_scene: MakeScene,
    version_3: Callable[[], Library3],
    head_dim: int,
    heads: tuple[int, int],
    least: int,
) -> None:
    scene = make_scene([(300, 1)], head_dim=head_dim, heads=heads, page_size=128)
    assert told_of(scene, version_3()) == [least, 301]


def test_version_3_is_told_of_long_runs_as_they_are(
    make_scene: MakeScene, version_3: Callable[[], Library3]
) -> None:
    assert told_of(make_scene([(3, 200)], page_size=128), version_3()) == [200, 203]


@pytest.mark.parametrize("lengths", [[(0, 1)], [(300, 1)]], ids=["new", "prefix"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("heads", [(1, 1), (256, 1)], ids=str)
def test_version_3_is_never_told_of_a_single_new_token(
    make_scene: MakeScene,
    version_3: Callable[[], Library3],
    lengths: list[tuple[int, int]],
    head_dim: int,
    heads: tuple[int, int],
) -> None:
    scene = make_scene(lengths, head_dim=head_dim, heads=heads, page_size=128)
    assert told_of(scene, version_3())[0] >= 2


@pytest.mark.parametrize("lengths", [[(0, 1)], [(300, 1)], [(7, 30), (300, 4)]], ids=str)
def test_version_4_is_told_of_lengths_as_they_are(
    make_scene: MakeScene, version_4: Callable[[], Library4], lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths)
    found = told_of(scene, version_4())
    assert found == [scene.batch.max_new_len, scene.batch.max_kv_len]


@pytest.mark.parametrize("lengths", [[(0, 3)], [(40, 5)]], ids=["new", "prefix"])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_lengths_are_told_as_integers(
    make_scene: MakeScene, library: Library, name: str, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=256)
    scene.attend(scene.make(library.backend))
    assert type(library.calls[0][name]) is int


# Pages

PAGES = [
    ("version_2", 64, 256, True),
    ("version_2", 64, 512, True),
    ("version_2", 128, 256, True),
    ("version_2", 64, 128, False),
    ("version_2", 64, 384, False),
    ("version_2", 64, 16, False),
    ("version_3", 64, 128, True),
    ("version_3", 64, 256, True),
    ("version_3", 64, 384, True),
    ("version_3", 128, 128, True),
    ("version_3", 128, 16, False),
    ("version_3", 64, 64, False),
    ("version_3", 64, 192, False),
    ("version_3", 96, 128, False),
    ("version_3", 96, 144, False),
    ("version_3", 192, 128, False),
    ("version_3", 256, 128, False),
    ("version_4", 64, 1, True),
    ("version_4", 64, 16, True),
    ("version_4", 128, 128, True),
]


@pytest.mark.parametrize(("version", "head_dim", "page_size", "read"), PAGES)
def test_pages_are_read_where_the_kernel_can_and_gathered_elsewhere(
    make_scene: MakeScene,
    request: pytest.FixtureRequest,
    version: str,
    head_dim: int,
    page_size: int,
    read: bool,
) -> None:
    library = request.getfixturevalue(version)()
    scene = make_scene([(5, 3)], head_dim=head_dim, page_size=page_size)
    metadata = scene.make(library.backend).init_forward_metadata(scene.batch)
    assert metadata.source == (KeySource.PAGES if read else KeySource.GATHERED)


# Limits

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, page_size=256, scale=0.1
)
CUDA = torch.device("cuda")
LIMITS = BackendLimits(max_tokens=64, max_requests=4, max_context=128, num_pages=8)
BACKENDS = [FlashAttention2, FlashAttention3, FlashAttention4]
Gpu = Callable[[tuple[int, int] | None], None]


@pytest.fixture
def hopper(gpu: Gpu) -> None:
    gpu((9, 0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_common_shape_is_served(
    absent: None, hopper: None, backend: type[FlashAttentionBackend]
) -> None:
    assert backend.unsupported(SPEC, CUDA) is None


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("backend", [FlashAttentionBackend, FlashAttention2, FlashAttention4])
def test_versions_2_and_4_take_multiples_of_8(
    hopper: None, backend: type[FlashAttentionBackend], head_dim: int
) -> None:
    assert backend.unsupported(replace(SPEC, head_dim=head_dim), CUDA) is None


@pytest.mark.parametrize("head_dim", [1, 20, 100, 264, 512])
@pytest.mark.parametrize("backend", [FlashAttentionBackend, FlashAttention2, FlashAttention4])
def test_versions_2_and_4_refuse_other_head_dims(
    hopper: None, backend: type[FlashAttentionBackend], head_dim: int
) -> None:
    reason = backend.unsupported(replace(SPEC, head_dim=head_dim), CUDA)
    assert reason == f"head_dims: takes multiples of 8 up to 256, not {head_dim}"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_version_3_takes_the_head_dims_it_is_built_for(hopper: None, head_dim: int) -> None:
    assert FlashAttention3.unsupported(replace(SPEC, head_dim=head_dim), CUDA) is None


@pytest.mark.parametrize("head_dim", [8, 32, 80, 160, 264])
def test_version_3_refuses_other_head_dims(hopper: None, head_dim: int) -> None:
    reason = FlashAttention3.unsupported(replace(SPEC, head_dim=head_dim), CUDA)
    assert reason == f"head_dims: takes [64, 96, 128, 192, 256], not {head_dim}"


@pytest.mark.parametrize(
    ("backend", "capability", "reason"),
    [
        (FlashAttention2, (7, 5), "min_compute_capability: needs (8, 0), this GPU has (7, 5)"),
        (FlashAttention2, (8, 0), None),
        (FlashAttention2, (10, 0), None),
        (FlashAttention3, (8, 9), "min_compute_capability: needs (9, 0), this GPU has (8, 9)"),
        (FlashAttention3, (9, 0), None),
        (FlashAttention3, (10, 0), "min_compute_capability: runs on compute capability 9.x only"),
        (FlashAttention3, (12, 0), "min_compute_capability: runs on compute capability 9.x only"),
        (FlashAttention4, (7, 5), "min_compute_capability: needs (8, 0), this GPU has (7, 5)"),
        (FlashAttention4, (8, 0), None),
        (FlashAttention4, (10, 0), None),
    ],
)
def test_gpus_without_kernels_are_refused(
    gpu: Gpu,
    backend: type[FlashAttentionBackend],
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    gpu(capability)
    assert backend.unsupported(SPEC, CUDA) == reason


@pytest.mark.parametrize("backend", [FlashAttentionBackend, *BACKENDS])
def test_the_cpu_is_refused(backend: type[FlashAttentionBackend]) -> None:
    reason = backend.unsupported(SPEC, torch.device("cpu"))
    assert reason == "devices: runs on cuda, not on cpu"


@pytest.mark.parametrize("backend", [FlashAttentionBackend, *BACKENDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes_are_refused(
    hopper: None, backend: type[FlashAttentionBackend], dtype: torch.dtype
) -> None:
    reason = str(backend.unsupported(replace(SPEC, dtype=dtype), CUDA))
    assert reason.startswith("dtypes: takes bfloat16, float16, not ")


FLOAT16 = replace(SPEC, dtype=torch.float16)


@pytest.mark.parametrize("backend", [FlashAttention2, FlashAttention4])
def test_versions_2_and_4_take_float16(hopper: None, backend: type[FlashAttentionBackend]) -> None:
    assert backend.unsupported(FLOAT16, CUDA) is None


def test_version_3_takes_float16_from_the_full_build(
    absent: None, hopper: None, install: Callable[..., Any]
) -> None:
    install("flash_attn_interface")
    assert FlashAttention3.unsupported(FLOAT16, CUDA) is None


def test_version_3_refuses_float16_from_fa3_fwd(
    absent: None, hopper: None, install: Callable[..., Any]
) -> None:
    install("fa3_fwd_interface")
    reason = FlashAttention3.unsupported(FLOAT16, CUDA)
    assert reason == "dtypes: fa3-fwd is built without float16; takes bfloat16"


def test_a_refusal_comes_before_the_library_is_called(
    hopper: None, version_2: Callable[[], Library2]
) -> None:
    library = version_2()
    with pytest.raises(UnsupportedSpecError, match="head_dims: takes multiples of 8"):
        create_backend(FlashAttentionBackend, replace(SPEC, head_dim=20), LIMITS, CUDA, version=2)
    assert library.calls == []


# Which library version 3 is


@pytest.mark.parametrize(
    ("module", "namespace"),
    [("flash_attn_interface", "flash_attn_3"), ("fa3_fwd_interface", "fa3_fwd")],
)
def test_version_3_is_found_in_either_package(
    make_scene: MakeScene, version_3: Callable[..., Library3], module: str, namespace: str
) -> None:
    library = version_3(module, namespace)
    scene = make_scene([(0, 3), (40, 5)], page_size=128)
    assert error(scene.attend(scene.make(FlashAttention3)), scene.expected()) < 1e-6
    assert len(library.calls) == 1


def test_the_full_build_of_version_3_goes_first(
    make_scene: MakeScene, version_3: Callable[..., Library3]
) -> None:
    version_3("fa3_fwd_interface", "fa3_fwd")
    version_3("flash_attn_interface", "flash_attn_3")
    backend = make_scene([(0, 3)]).make(FlashAttention3)
    assert backend._fwd is torch.ops.flash_attn_3.fwd.default


# Availability and choice


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (
            FlashAttention2,
            "flash_attn_2_cuda is not installed: pip install flash-attn --no-build-isolation",
        ),
        (FlashAttention3, "fa3_fwd_interface is not installed: pip install fa3-fwd"),
    ],
)
def test_a_missing_library_is_named_with_its_hint(
    absent: None, backend: type[FlashAttentionBackend], reason: str
) -> None:
    assert backend.unavailable() == reason


def test_a_broken_build_of_version_3_is_not_hidden_by_the_missing_other(
    absent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_error(module: str, hint: str) -> str:
        broken = module == "flash_attn_interface"
        return f"{module} is {'installed but does not load' if broken else 'not installed'}"

    monkeypatch.setattr("bcg_backends.flash_attn_3.import_error", import_error)
    assert FlashAttention3.unavailable() == "flash_attn_interface is installed but does not load"


def test_version_4_is_not_mistaken_for_the_copy_in_version_2(
    absent: None, install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("bcg_backends.vendor.version", version)
    install("flash_attn.cute.interface")
    reason = FlashAttention4.unavailable()
    assert reason == "flash-attn-4 is not installed: pip install --pre flash-attn-4"


def test_version_4_that_is_hidden_says_so(
    absent: None, install_distribution: Callable[[str, str], None]
) -> None:
    install_distribution("flash-attn-4", "4.0.0b36")
    reason = str(FlashAttention4.unavailable())
    assert reason.startswith("flash_attn.cute.interface is not installed: ")


def test_an_installed_version_is_available(library: Library) -> None:
    assert library.backend.unavailable() is None


def test_one_installed_version_is_enough(library: Library) -> None:
    assert FlashAttentionBackend.unavailable() is None


def test_without_any_version_each_is_explained(absent: None) -> None:
    reason = str(FlashAttentionBackend.unavailable())
    hints = [
        backend.unavailable() for backend in (FlashAttention3, FlashAttention4, FlashAttention2)
    ]
    assert reason.split("; ") == hints


@pytest.mark.parametrize(
    ("version", "backend"),
    [
        (2, FlashAttention2),
        (3, FlashAttention3),
        (4, FlashAttention4),
        ("2", FlashAttention2),
        ("3", FlashAttention3),
        ("4", FlashAttention4),
    ],
    ids=repr,
)
def test_a_version_is_chosen_installed_or_not(
    absent: None, version: int | str, backend: type[FlashAttentionBackend]
) -> None:
    assert FlashAttentionBackend.select({"version": version, "other": 1}) == (backend, {"other": 1})


@pytest.mark.parametrize("version", [1, 5, "", "2.8", "fa3", None], ids=repr)
def test_an_unknown_version_is_refused(version: Any) -> None:
    with pytest.raises(BackendOptionError, match=f"version is 2, 3, 4 or auto, not {version}"):
        FlashAttentionBackend.select({"version": version})


InstallVersions = Callable[[tuple[int, ...]], None]


@pytest.mark.parametrize("options", [{}, {"version": "auto"}], ids=str)
@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ((2, 3, 4), FlashAttention3),
        ((2, 4), FlashAttention4),
        ((2, 3), FlashAttention3),
        ((2,), FlashAttention2),
        ((), FlashAttentionBackend),
    ],
    ids=str,
)
def test_auto_takes_the_first_installed_of_3_4_2(
    hopper: None,
    install_versions: InstallVersions,
    options: dict[str, Any],
    installed: tuple[int, ...],
    chosen: type[FlashAttentionBackend],
) -> None:
    install_versions(installed)
    assert FlashAttentionBackend.select(options) == (chosen, {})


@pytest.mark.parametrize(
    ("installed", "capability", "chosen"),
    [
        ((2, 3, 4), (8, 0), FlashAttention4),
        ((2, 3), (8, 0), FlashAttention2),
        ((2, 3), (10, 0), FlashAttention2),
        ((2, 3, 4), (10, 0), FlashAttention4),
        ((2, 3, 4), None, FlashAttention3),
        # Nothing runs: the first one says why.
        ((3,), (10, 0), FlashAttention3),
        ((2, 4), (7, 5), FlashAttention4),
    ],
    ids=str,
)
def test_auto_passes_over_versions_without_kernels_for_the_gpu(
    gpu: Gpu,
    install_versions: InstallVersions,
    installed: tuple[int, ...],
    capability: tuple[int, int] | None,
    chosen: type[FlashAttentionBackend],
) -> None:
    gpu(capability)
    install_versions(installed)
    assert FlashAttentionBackend.select({}) == (chosen, {})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_version_selects_itself(backend: type[FlashAttentionBackend]) -> None:
    assert backend.select({"other": 1}) == (backend, {"other": 1})


def test_there_is_a_variant_a_version() -> None:
    chosen = [FlashAttentionBackend.select(options) for options in FlashAttentionBackend.variants()]
    assert chosen == [(backend, {}) for backend in BACKENDS]
