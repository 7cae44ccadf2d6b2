"""What the variable-length adapters tell their kernels, against arrays worked out by hand.

Shape letters: R real tokens, B requests, W pages of a request, S keys of all requests, N query heads, K KV heads,
H head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_backends.varlen import (
    KeySource,
    VarlenBackend,
    VarlenBuffers,
    VarlenMetadata,
    refuse_page_size,
)
from bcg_core import AttentionSpec, BackendLimits, Capabilities, UnsupportedSpecError
from bcg_harness.testing.ambient_states import PUT_ASIDE

MakeScene = Callable[..., Any]

CPU = torch.device("cpu")
LIMITS = BackendLimits(max_tokens=64, max_requests=5, max_context=18, num_pages=32)
# Pages of 4 tokens: request 0 has page 1, request 1 has 3 and 2 in this order, request 2 has 4.
THREE = [(0, 3), (5, 2), (0, 1)]


@dataclass(frozen=True)
class Call:
    """What a kernel was called with."""

    paged: bool
    arguments: tuple[Any, ...]


class Recorder(VarlenBackend):
    """Record kernel calls; reads pages of multiples of 8 tokens."""

    name = "recorder"
    capabilities = Capabilities(devices=frozenset({"cpu"}), supports_full_graph=True)

    def __init__(self, spec: AttentionSpec, limits: BackendLimits, device: torch.device) -> None:
        super().__init__(spec, limits, device)
        self.calls: list[Call] = []

    @classmethod
    def refuse_pages(cls, spec: AttentionSpec) -> str | None:
        return refuse_page_size(spec, 8)

    def launch(self, q_RNH: Tensor, *arguments: Any, paged: bool) -> Tensor:
        self.calls.append(Call(paged, (q_RNH, *arguments)))
        return q_RNH


class Gatherer(VarlenBackend):
    """Leave everything at its default."""

    name = "gatherer"
    capabilities = Capabilities(devices=frozenset({"cpu"}))

    def launch(self, q_RNH: Tensor, *arguments: Any, paged: bool) -> Tensor:
        return q_RNH


def as_lists(metadata: VarlenMetadata) -> dict[str, Any]:
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


# The ordinary path


def test_metadata_of_a_batch_against_values_by_hand(make_scene: MakeScene) -> None:
    scene = make_scene(THREE, page_size=4)
    assert as_lists(scene.make(Recorder).init_forward_metadata(scene.batch)) == {
        "source": KeySource.GATHERED,
        "cu_new_lens": [0, 3, 5, 6],
        "cu_kv_lens": [0, 3, 10, 11],
        "kv_lens": [3, 7, 1],
        "page_table_BW": [[1, 0], [3, 2], [4, 0]],
        "max_new_len": 3,
        "max_kv_len": 7,
        "slots_S": [4, 5, 6, 12, 13, 14, 15, 8, 9, 10, 16],
    }


INDICES = ["cu_new_lens", "cu_kv_lens", "kv_lens", "page_table_BW"]


def bucket_metadata(scene: Any) -> VarlenMetadata:
    backend = scene.make(Recorder)
    return backend.update_bucket_metadata(backend.init_bucket_metadata(64), scene.batch)


def ordinary_metadata(scene: Any) -> VarlenMetadata:
    return scene.make(Recorder).init_forward_metadata(scene.batch)


@pytest.mark.parametrize("prepare", [ordinary_metadata, bucket_metadata])
@pytest.mark.parametrize("name", INDICES)
def test_index_arrays_are_int32_with_unit_stride(
    make_scene: MakeScene, name: str, prepare: Callable[[Any], VarlenMetadata]
) -> None:
    array = getattr(prepare(make_scene(THREE, page_size=4)), name)
    assert (array.dtype, array.stride(-1), array.device) == (torch.int32, 1, CPU)


@pytest.mark.parametrize("prepare", [ordinary_metadata, bucket_metadata])
@pytest.mark.parametrize("state", ["set_default_device", "with_device", "default_float64"])
def test_index_arrays_do_not_depend_on_the_defaults_of_the_caller(
    make_scene: MakeScene, state: str, prepare: Callable[[Any], VarlenMetadata]
) -> None:
    scene = make_scene(THREE, page_size=4)
    assert as_lists(PUT_ASIDE[state](lambda: prepare(scene))) == as_lists(prepare(scene))


@pytest.mark.parametrize("prepare", [ordinary_metadata, bucket_metadata])
@pytest.mark.parametrize("name", ["max_new_len", "max_kv_len"])
def test_lengths_that_launches_take_are_integers_of_the_host(
    make_scene: MakeScene, name: str, prepare: Callable[[Any], VarlenMetadata]
) -> None:
    assert type(getattr(prepare(make_scene(THREE, page_size=4)), name)) is int


def test_rows_to_gather_are_int64(make_scene: MakeScene) -> None:
    slots_S = ordinary_metadata(make_scene(THREE, page_size=4)).slots_S
    assert slots_S is not None
    assert slots_S.dtype == torch.int64


# Where keys are read

SOURCES = [
    ([(0, 3)], 4, KeySource.NEW),
    ([(0, 3)], 8, KeySource.NEW),
    ([(0, 3), (0, 20)], 8, KeySource.NEW),
    ([(1, 3)], 8, KeySource.PAGES),
    ([(1, 3)], 16, KeySource.PAGES),
    ([(0, 3), (1, 1)], 8, KeySource.PAGES),
    ([(1, 3)], 4, KeySource.GATHERED),
    ([(0, 3), (1, 1)], 4, KeySource.GATHERED),
    ([(1, 3)], 12, KeySource.GATHERED),
]


@pytest.mark.parametrize("prepare", [ordinary_metadata, bucket_metadata])
@pytest.mark.parametrize(("lengths", "page_size", "source"), SOURCES, ids=str)
def test_keys_are_read_where_prefixes_and_page_size_say(
    make_scene: MakeScene,
    lengths: list[tuple[int, int]],
    page_size: int,
    source: KeySource,
    prepare: Callable[[Any], VarlenMetadata],
) -> None:
    assert prepare(make_scene(lengths, page_size=page_size)).source == source


@pytest.mark.parametrize("prepare", [ordinary_metadata, bucket_metadata])
@pytest.mark.parametrize(("lengths", "page_size", "source"), SOURCES, ids=str)
def test_rows_to_gather_are_named_only_where_they_are_gathered(
    make_scene: MakeScene,
    lengths: list[tuple[int, int]],
    page_size: int,
    source: KeySource,
    prepare: Callable[[Any], VarlenMetadata],
) -> None:
    metadata = prepare(make_scene(lengths, page_size=page_size))
    assert (metadata.slots_S is not None) == (source is KeySource.GATHERED)


def test_pages_are_not_read_unless_a_backend_says_so(make_scene: MakeScene) -> None:
    scene = make_scene([(3, 1)], page_size=256)
    metadata = scene.make(Gatherer).init_forward_metadata(scene.batch)
    assert metadata.source is KeySource.GATHERED


def test_pages_never_reach_a_backend_that_reads_none(make_scene: MakeScene) -> None:
    scene = make_scene([(3, 1)], page_size=8)
    pages = scene.make(Recorder).init_forward_metadata(scene.batch)
    with pytest.raises(AssertionError, match="reads no pages"):
        scene.attend(scene.make(Gatherer), metadata=pages)


def test_new_rows_are_attended_over_where_they_are(make_scene: MakeScene) -> None:
    scene = make_scene([(0, 3), (0, 2)])
    backend = scene.make(Recorder)
    metadata, out = backend.init_forward_metadata(scene.batch), torch.empty(0)
    scene.attend(backend, metadata=metadata, out=out)
    (call,) = backend.calls
    assert not call.paged
    expected = (scene.q_RNH, scene.k_RKH, scene.v_RKH, metadata, out)
    assert all(given is what for given, what in zip(call.arguments, expected, strict=True))


def test_pages_are_attended_over_in_the_cache_of_the_layer(make_scene: MakeScene) -> None:
    scene = make_scene(THREE, page_size=8)
    backend = scene.make(Recorder)
    metadata, out = backend.init_forward_metadata(scene.batch), torch.empty(0)
    scene.attend(backend, 1, metadata=metadata, out=out)
    (call,) = backend.calls
    assert call.paged
    pages = (scene.kv_cache.keys(1), scene.kv_cache.values(1))
    expected: tuple[Any, ...] = (scene.q_RNH, *pages, metadata, out)
    assert all(given is what for given, what in zip(call.arguments, expected, strict=True))


@pytest.mark.parametrize("layer", [0, 1])
def test_gathered_rows_are_those_of_the_layer_in_the_order_of_tokens(
    make_scene: MakeScene, layer: int
) -> None:
    scene = make_scene(THREE, page_size=4)
    numbers = torch.arange(scene.kv_cache.num_slots).float()[:, None, None]
    keys, values = scene.kv_cache.flat(layer)
    keys.copy_(numbers.expand_as(keys))
    values.copy_(-numbers.expand_as(values))
    backend = scene.make(Recorder)
    scene.attend(backend, layer)
    (call,) = backend.calls
    assert not call.paged
    k_SKH, v_SKH = call.arguments[1:3]
    expected = [4.0, 5, 6, 12, 13, 14, 15, 8, 9, 10, 16]
    assert k_SKH[:, 1, 7].tolist() == expected
    assert v_SKH[:, 1, 7].tolist() == [-slot for slot in expected]


# The path of a bucket


def loaded(scene: Any, buffers: VarlenBuffers) -> VarlenMetadata:
    return buffers.load(scene.batch, KeySource.GATHERED)


def whole(array: Tensor, *shape: int) -> Tensor:
    """Return what a kernel reads that is launched for more requests than ``array`` has."""
    return array.as_strided(shape, array.stride())


@pytest.fixture
def buffers() -> VarlenBuffers:
    return VarlenBuffers(LIMITS, 4, CPU)


def test_metadata_of_a_bucket_against_values_by_hand(
    make_scene: MakeScene, buffers: VarlenBuffers
) -> None:
    assert as_lists(loaded(make_scene(THREE, page_size=4), buffers)) == {
        "source": KeySource.GATHERED,
        "cu_new_lens": [0, 3, 5, 6],
        "cu_kv_lens": [0, 3, 10, 11],
        "kv_lens": [3, 7, 1],
        # 18 tokens of 4 a page are 5 pages.
        "page_table_BW": [[1, 0, 0, 0, 0], [3, 2, 0, 0, 0], [4, 0, 0, 0, 0]],
        "max_new_len": 3,
        "max_kv_len": 7,
        "slots_S": [4, 5, 6, 12, 13, 14, 15, 8, 9, 10, 16],
    }


@pytest.mark.parametrize("name", INDICES)
def test_a_bucket_keeps_its_addresses(
    make_scene: MakeScene, buffers: VarlenBuffers, name: str
) -> None:
    before = getattr(loaded(make_scene(THREE, page_size=4), buffers), name)
    after = getattr(loaded(make_scene([(0, 2), (9, 9)], page_size=4), buffers), name)
    assert before.data_ptr() == after.data_ptr()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cu_new_lens", [0, 2, 11]),
        ("cu_kv_lens", [0, 2, 20]),
        ("kv_lens", [2, 18]),
        ("page_table_BW", [[1, 0, 0, 0, 0], [6, 5, 4, 3, 2]]),
    ],
)
def test_a_bucket_is_refreshed_in_place(
    make_scene: MakeScene, buffers: VarlenBuffers, name: str, expected: list[Any]
) -> None:
    array = getattr(loaded(make_scene([(1, 1), (1, 1)], page_size=4), buffers), name)
    loaded(make_scene([(0, 2), (9, 9)], page_size=4), buffers)
    assert array.tolist() == expected


FIVE = [(4, 3), (5, 2), (0, 1), (7, 7), (1, 2)]


@pytest.mark.parametrize(
    ("lengths", "name", "expected"),
    [
        ([(3, 2)], "cu_new_lens", [0, 2, 2, 2, 2, 2]),
        ([(3, 2)], "cu_kv_lens", [0, 5, 5, 5, 5, 5]),
        ([(3, 2)], "kv_lens", [5, 0, 0, 0, 0]),
        ([(0, 1), (3, 2)], "cu_new_lens", [0, 1, 3, 3, 3, 3]),
        ([(0, 1), (3, 2)], "cu_kv_lens", [0, 1, 6, 6, 6, 6]),
        ([(0, 1), (3, 2)], "kv_lens", [1, 5, 0, 0, 0]),
        (FIVE, "cu_new_lens", [0, 3, 5, 6, 13, 15]),
        (FIVE, "cu_kv_lens", [0, 7, 14, 15, 29, 32]),
        (FIVE, "kv_lens", [7, 7, 1, 14, 3]),
    ],
    ids=str,
)
def test_requests_beyond_the_live_ones_have_no_tokens(
    make_scene: MakeScene,
    buffers: VarlenBuffers,
    lengths: list[tuple[int, int]],
    name: str,
    expected: list[int],
) -> None:
    loaded(make_scene(FIVE, page_size=4), buffers)
    array = getattr(loaded(make_scene(lengths, page_size=4), buffers), name)
    assert whole(array, len(expected)).tolist() == expected


def test_pages_beyond_the_live_ones_are_pages_of_the_cache(
    make_scene: MakeScene, buffers: VarlenBuffers
) -> None:
    large = make_scene(FIVE, page_size=4)
    loaded(large, buffers)
    table = whole(loaded(make_scene([(3, 2)], page_size=4), buffers).page_table_BW, 5, 5)
    assert table[0, :2].tolist() == [2, 1]
    assert ((table >= 0) & (table < large.kv_cache.num_pages)).all()


def test_a_bucket_starts_without_tokens_and_on_page_0(
    make_scene: MakeScene, buffers: VarlenBuffers
) -> None:
    table = whole(loaded(make_scene([(0, 1)], page_size=4), buffers).page_table_BW, 5, 5)
    assert table.tolist() == [[1, 0, 0, 0, 0], *[[0] * 5] * 4]


def test_the_buffers_of_a_backend_fit_its_limits(make_scene: MakeScene) -> None:
    scene = make_scene([(500, 12)] * 3)
    backend = scene.make(Recorder)
    metadata = backend.update_bucket_metadata(backend.init_bucket_metadata(64), scene.batch)
    assert metadata.page_table_BW.shape == (3, 512 // 16)
    assert whole(metadata.cu_new_lens, 65).tolist() == [0, 12, 24, *[36] * 62]


def test_buckets_do_not_share_buffers(make_scene: MakeScene) -> None:
    scene = make_scene(THREE)
    backend = scene.make(Recorder)
    first, second = (
        backend.update_bucket_metadata(backend.init_bucket_metadata(bucket), scene.batch)
        for bucket in (8, 64)
    )
    assert first.cu_new_lens.data_ptr() != second.cu_new_lens.data_ptr()


def test_a_result_is_that_of_the_kernel(make_scene: MakeScene) -> None:
    scene = make_scene(THREE)
    assert scene.attend(scene.make(Gatherer)) is scene.q_RNH


# What a full graph is given


def test_metadata_of_a_full_graph_against_values_by_hand(
    make_scene: MakeScene, buffers: VarlenBuffers
) -> None:
    full = buffers.full(64)
    loaded(make_scene(FIVE, page_size=4), buffers)
    loaded(make_scene(THREE, page_size=4), buffers)
    assert as_lists(full) == {
        "source": KeySource.PAGES,
        "cu_new_lens": [0, 3, 5, 6, 6, 6],
        "cu_kv_lens": [0, 3, 10, 11, 11, 11],
        "kv_lens": [3, 7, 1, 0, 0],
        # The two dead slots still have the pages of FIVE.
        "page_table_BW": [
            [1, 0, 0, 0, 0],
            [3, 2, 0, 0, 0],
            [4, 0, 0, 0, 0],
            [9, 8, 7, 6, 0],
            [10, 0, 0, 0, 0],
        ],
        "max_new_len": 18,
        "max_kv_len": 18,
        "slots_S": None,
    }


@pytest.mark.parametrize("name", INDICES)
def test_a_full_graph_reads_what_is_loaded(
    make_scene: MakeScene, buffers: VarlenBuffers, name: str
) -> None:
    full = getattr(buffers.full(64), name)
    live = getattr(loaded(make_scene(THREE, page_size=4), buffers), name)
    assert full.data_ptr() == live.data_ptr()
    assert full.stride() == live.stride()


@pytest.mark.parametrize(("bucket", "slots"), [(1, 1), (4, 4), (5, 5), (64, 5)])
def test_a_full_graph_has_a_slot_for_every_request_there_can_be(
    buffers: VarlenBuffers, bucket: int, slots: int
) -> None:
    full = buffers.full(bucket)
    assert [len(getattr(full, name)) for name in INDICES] == [slots + 1, slots + 1, slots, slots]


@pytest.mark.parametrize(("bucket", "longest"), [(1, 1), (17, 17), (18, 18), (64, 18)])
def test_lengths_of_a_full_graph_are_bounds(
    buffers: VarlenBuffers, bucket: int, longest: int
) -> None:
    full = buffers.full(bucket)
    assert (full.max_new_len, full.max_kv_len) == (longest, 18)


def test_without_a_batch_a_full_graph_has_no_tokens_and_page_0(buffers: VarlenBuffers) -> None:
    full = buffers.full(64)
    assert not any(getattr(full, name).any() for name in INDICES)


@pytest.mark.parametrize("lengths", [[(0, 3)], [(5, 3)]], ids=["new", "prefix"])
def test_a_full_graph_reads_pages_also_without_a_prefix(
    make_scene: MakeScene, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, page_size=8)
    backend = scene.make(Recorder)
    scene.attend_full(backend, 16)
    assert [call.paged for call in backend.calls] == [True]


@pytest.mark.parametrize(
    ("backend", "page_size", "reason"),
    [
        (Recorder, 4, "reads pages of multiples of 8 tokens, not of 4"),
        (Gatherer, 8, "reads no pages"),
    ],
    ids=["page_size", "no_pages"],
)
def test_a_kernel_that_reads_no_such_pages_gives_no_full_graph(
    make_scene: MakeScene, backend: type[VarlenBackend], page_size: int, reason: str
) -> None:
    made = make_scene(THREE, page_size=page_size).make(backend)
    assert reason in made.refuse_full_graph()
    with pytest.raises(UnsupportedSpecError, match=reason):
        made.full_graph_metadata(made.init_bucket_metadata(16), 16)


def test_a_backend_that_reads_pages_gives_a_full_graph(make_scene: MakeScene) -> None:
    assert make_scene(THREE, page_size=8).make(Recorder).refuse_full_graph() is None
