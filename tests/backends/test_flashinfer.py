"""The FlashInfer adapter on a stand-in for FlashInfer, and on a stream whose GPU is behind.

The stand-in stages a plan in host memory and copies it to the device when the stream gets there, as FlashInfer does:
whoever plans again before that loses the plan.

Shape letters: R real tokens, S keys of all requests, P pages, N query heads, K KV heads, H head dim.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bcg_backends.flashinfer import (
    FlashInferBackend,
    FlashInferFA2,
    FlashInferFA3,
    PlanArrays,
    PlanSlot,
)
from bcg_core import (
    AttentionSpec,
    BackendLimits,
    BackendOptionError,
    BackendUnavailableError,
    PrefillBatch,
)
from bcg_core.registry import create_backend
from bcg_harness.testing.ambient_states import PUT_ASIDE

MakeScene = Callable[..., Any]
Gpu = Callable[[tuple[int, int] | None], None]

MIB = 2**20


@dataclass
class Stream:
    """Hold what was queued until somebody waits for it; ``behind`` is False for a GPU that is never behind."""

    behind: bool = False
    waiting: deque[Callable[[], Any]] = field(default_factory=deque)
    queued: int = 0
    done: int = 0

    def queue(self, work: Callable[[], Any]) -> None:
        self.waiting.append(work)
        self.queued += 1
        if not self.behind:
            self.run_to(self.queued)

    def run_to(self, number: int) -> None:
        while self.done < number:
            self.waiting.popleft()()
            self.done += 1

    def synchronize(self) -> None:
        self.run_to(self.queued)


class Wrapper:
    """Do what both prefill wrappers do with a plan."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
        library: "Library",
    ) -> None:
        assert (kv_layout, use_cuda_graph) == ("NHD", False)
        self.workspace = float_workspace_buffer
        self.backend = backend
        self.library = library
        self.plans: list[dict[str, Any]] = []
        self._staged: dict[str, Any] = {}
        self._on_device: dict[str, Any] = {}

    def keep(self, plan: dict[str, Any]) -> None:
        assert plan["q_data_type"] == plan["kv_data_type"]
        self.plans.append(plan)
        self._staged.clear()
        self._staged.update(plan)
        self.library.stream.queue(lambda: self._copy())

    def _copy(self) -> None:
        self._on_device = dict(self._staged)

    def launch(
        self, q: Tensor, out: Tensor | None, compute: Callable[[dict[str, Any]], Tensor]
    ) -> Tensor:
        plan = self.plans[-1]
        assert len(q) == int(plan["qo_indptr"][-1]), "q has other rows than were planned"
        assert q.dtype == plan["q_data_type"], "q has another dtype than was planned"
        assert q.shape[1:] == (plan["num_qo_heads"], plan["head_dim_qk"])
        result = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        assert result.is_contiguous(), "strides of out are ignored"
        self.library.stream.queue(lambda: self._write(result, compute))
        return result

    def _write(self, result: Tensor, compute: Callable[[dict[str, Any]], Tensor]) -> None:
        rows = int(self._on_device["qo_indptr"][-1])
        # A plan of another batch writes its own rows, as far as there are any.
        if rows == len(result):
            result.copy_(compute(self._on_device))


class Ragged(Wrapper):
    """BatchPrefillWithRaggedKVCacheWrapper of FlashInfer 0.6.13."""

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        self.keep({name: value for name, value in locals().items() if name != "self"})

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None) -> Tensor:
        def compute(plan: dict[str, Any]) -> Tensor:
            options = {"scale": plan["sm_scale"], "causal": plan["causal"]}
            indices = (plan["qo_indptr"], plan["kv_indptr"])
            result: Tensor = self.library.math.flat(q, k, v, *indices, **options)
            return result

        return self.launch(q, out, compute)


class Paged(Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper of FlashInfer 0.6.13."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        self.keep({name: value for name, value in locals().items() if name != "self"})

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None
    ) -> Tensor:
        keys, values = paged_kv_cache
        assert keys.shape[1] == self.plans[-1]["page_size"]

        def compute(plan: dict[str, Any]) -> Tensor:
            starts = plan["paged_kv_indptr"]
            last = plan["paged_kv_last_page_len"]
            table = torch.nn.utils.rnn.pad_sequence(
                plan["paged_kv_indices"].split(starts.diff().tolist()), batch_first=True
            )
            kv_lens = (starts.diff() - 1).clamp(min=0) * plan["page_size"] + last
            options = {"scale": plan["sm_scale"], "causal": plan["causal"]}
            result: Tensor = self.library.math.paged(
                q, keys, values, plan["qo_indptr"], kv_lens, table, **options
            )
            return result

        return self.launch(q, out, compute)


@dataclass
class Library:
    """Stand in for FlashInfer, and keep the wrappers that were made."""

    math: Any
    stream: Stream = field(default_factory=Stream)
    paged: list[Paged] = field(default_factory=list)
    ragged: list[Ragged] = field(default_factory=list)

    def make_paged(self, *arguments: Any, **options: Any) -> Paged:
        self.paged.append(Paged(*arguments, library=self, **options))
        return self.paged[-1]

    def make_ragged(self, *arguments: Any, **options: Any) -> Ragged:
        self.ragged.append(Ragged(*arguments, library=self, **options))
        return self.ragged[-1]

    @property
    def wrappers(self) -> list[Wrapper]:
        return [*self.paged, *self.ragged]


@pytest.fixture
def library(
    varlen_math: Any, install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Library:
    """Install FlashInfer, with events of its stream, and the multiprocessors of an H200."""
    found = Library(math=varlen_math)
    install(
        "flashinfer",
        BatchPrefillWithPagedKVCacheWrapper=found.make_paged,
        BatchPrefillWithRaggedKVCacheWrapper=found.make_ragged,
    )

    class Event:
        def record(self) -> None:
            self.number = found.stream.queued

        def synchronize(self) -> None:
            found.stream.run_to(self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return found


KERNELS = [FlashInferFA2, FlashInferFA3]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((actual.double() - expected).norm() / expected.norm())


# The arrays of a plan

# Pages of 4 tokens: request 0 has page 1, request 1 has 3 and 2 in this order, request 2 has 4, request 3 6 and 5.
FOUR = [(0, 3), (5, 2), (0, 1), (4, 4)]
ARRAYS = ["new_indptr", "page_indptr", "pages", "last_page_lens"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("new_indptr", [0, 3, 5, 6, 10]),
        ("page_indptr", [0, 1, 3, 4, 6]),
        ("pages", [1, 3, 2, 4, 6, 5]),
        ("last_page_lens", [3, 3, 1, 4]),
    ],
)
def test_arrays_of_a_plan_against_values_by_hand(
    make_scene: MakeScene, name: str, expected: list[int]
) -> None:
    arrays = PlanArrays.of(make_scene(FOUR, page_size=4).batch)
    assert getattr(arrays, name).tolist() == expected


@pytest.mark.parametrize(
    ("length", "pages", "last"),
    [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4), (9, 3, 1), (12, 3, 4)],
)
def test_the_last_page_of_a_request_is_never_empty(
    make_scene: MakeScene, length: int, pages: int, last: int
) -> None:
    arrays = PlanArrays.of(make_scene([(0, length)], page_size=4).batch)
    assert arrays.page_indptr.tolist() == [0, pages]
    assert arrays.last_page_lens.tolist() == [last]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_and_last_lengths_add_up_to_the_keys(make_scene: MakeScene, page_size: int) -> None:
    batch = make_scene([(n % 7, 1 + n % 5) for n in range(40)], page_size=page_size).batch
    arrays = PlanArrays.of(batch)
    counts = arrays.page_indptr.diff()
    assert ((counts - 1) * page_size + arrays.last_page_lens).tolist() == list(batch.kv_lens)
    assert len(arrays.pages) == int(arrays.page_indptr[-1])


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_a_plan_are_int32_and_contiguous(make_scene: MakeScene, name: str) -> None:
    array = getattr(PlanArrays.of(make_scene(FOUR, page_size=4).batch), name)
    assert (array.dtype, array.is_contiguous()) == (torch.int32, True)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("state", ["set_default_device", "with_device", "default_float64"])
def test_arrays_of_a_plan_do_not_depend_on_the_defaults_of_the_caller(
    make_scene: MakeScene, state: str, name: str
) -> None:
    batch = make_scene(FOUR, page_size=4).batch
    found = getattr(PUT_ASIDE[state](lambda: PlanArrays.of(batch)), name)
    assert found.tolist() == getattr(PlanArrays.of(batch), name).tolist()


@pytest.mark.parametrize(
    ("name", "device"),
    [("new_indptr", "cpu"), ("page_indptr", "cpu"), ("last_page_lens", "cpu"), ("pages", "meta")],
)
def test_only_page_numbers_are_on_the_device(make_scene: MakeScene, name: str, device: str) -> None:
    batch = replace(make_scene(FOUR, page_size=4).batch, device=torch.device("meta"))
    assert getattr(PlanArrays.of(batch), name).device.type == device


# Results, from the very plan

CASES: dict[str, list[tuple[int, int]]] = {
    "one_token": [(0, 1)],
    "two_requests": [(0, 8), (0, 5)],
    "one_token_behind_a_prefix_each": [(5, 1), (40, 1), (31, 1)],
    "a_prefix_of_one": [(1, 6)],
    "a_page_exactly": [(16, 16), (0, 16), (15, 1)],
    "mixed": [(0, 3), (127, 1), (128, 4), (1, 1), (0, 1), (17, 8)],
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_plans_say_what_the_result_needs(
    make_scene: MakeScene,
    library: Library,
    lengths: list[tuple[int, int]],
    page_size: int,
    kernel: type[FlashInferBackend],
) -> None:
    scene = make_scene(lengths, page_size=page_size)
    out = torch.full(scene.q_RNH.shape, float("nan"))
    scene.attend(scene.make(kernel), out=out)
    assert error(out, scene.expected()) < 1e-6


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_head_layouts_are_planned(
    make_scene: MakeScene, library: Library, heads: tuple[int, int], lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, heads=heads, head_dim=128)
    assert error(scene.attend(scene.make(FlashInferFA2)), scene.expected()) < 1e-6


def test_each_layer_reads_its_own_pages(make_scene: MakeScene, library: Library) -> None:
    scene = make_scene([(19, 6)])
    backend = scene.make(FlashInferFA2)
    assert error(scene.attend(backend, 1), scene.expected(layer=1)) < 1e-6


@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_one_plan_serves_every_layer(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths)
    backend = scene.make(FlashInferFA2)
    metadata = backend.init_forward_metadata(scene.batch)
    scene.attend(backend, 0, metadata=metadata)
    scene.attend(backend, 1, metadata=metadata)
    assert sum(len(wrapper.plans) for wrapper in library.wrappers) == 1


@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_out_is_written_and_returned(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths)
    out = torch.full(scene.q_RNH.shape, float("nan"))
    assert scene.attend(scene.make(FlashInferFA2), out=out) is out
    assert out.isfinite().all()


@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_plan_names_scale_and_dtypes_of_the_spec(
    make_scene: MakeScene, library: Library, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, dtype=dtype)
    scene = replace(scene, spec=replace(scene.spec, scale=0.07))
    scene.make(FlashInferFA2).init_forward_metadata(scene.batch)
    ((plan,),) = [wrapper.plans for wrapper in library.wrappers if wrapper.plans]
    found = (plan["sm_scale"], plan["q_data_type"], plan["kv_data_type"], plan["causal"])
    assert found == (0.07, dtype, dtype, True)


@pytest.mark.parametrize(
    ("lengths", "paged"),
    [
        ([(0, 3)], False),
        ([(0, 3), (0, 40)], False),
        ([(1, 3)], True),
        ([(0, 3), (1, 1)], True),
    ],
    ids=str,
)
def test_pages_are_read_where_tokens_are_cached(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]], paged: bool
) -> None:
    scene = make_scene(lengths)
    metadata = scene.make(FlashInferFA2).init_forward_metadata(scene.batch)
    assert metadata.paged == paged
    assert metadata.wrapper is (library.paged if paged else library.ragged)[0]


def test_there_is_no_metadata_of_a_bucket(make_scene: MakeScene, library: Library) -> None:
    assert make_scene([(0, 3)]).make(FlashInferFA2).init_bucket_metadata(8) is None


# Rotation


@pytest.mark.parametrize("in_flight", [2, 3])
@pytest.mark.parametrize("lengths", [[(0, 3)], [(19, 6)]], ids=["new", "prefix"])
def test_plans_go_round_the_wrappers(
    make_scene: MakeScene, library: Library, lengths: list[tuple[int, int]], in_flight: int
) -> None:
    scene = make_scene(lengths)
    backend = scene.make(FlashInferFA2, plans_in_flight=in_flight)
    used = [backend.init_forward_metadata(scene.batch).wrapper for _ in range(2 * in_flight)]
    assert len({id(wrapper) for wrapper in used}) == in_flight
    assert used[:in_flight] == used[in_flight:]


def test_two_plans_are_in_flight_unless_told_otherwise(
    make_scene: MakeScene, library: Library
) -> None:
    make_scene([(0, 3)]).make(FlashInferFA2)
    assert (len(library.paged), len(library.ragged)) == (2, 2)


@pytest.mark.parametrize("in_flight", [-1, 0, 1])
def test_fewer_than_two_plans_in_flight_are_refused(
    make_scene: MakeScene, library: Library, in_flight: int
) -> None:
    scene = make_scene([(0, 3)])
    message = f"plans_in_flight is at least 2, not {in_flight}"
    with pytest.raises(BackendOptionError, match=message):
        scene.make(FlashInferFA2, plans_in_flight=in_flight)


# The same number of tokens everywhere, so that a lost plan gives a result, and a wrong one.
BATCHES = {
    "new": [[(0, 6)], [(0, 2), (0, 4)], [(0, 5), (0, 1)], [(0, 3), (0, 3)], [(0, 1), (0, 5)]],
    "prefix": [[(9, 6)], [(3, 2), (8, 4)], [(20, 5), (1, 1)], [(2, 6)], [(4, 3), (7, 3)]],
    "both": [[(9, 6)], [(0, 2), (0, 4)], [(20, 5), (1, 1)], [(0, 6)], [(4, 3), (7, 3)]],
}


def results_behind(
    make_scene: MakeScene, library: Library, batches: list[list[tuple[int, int]]], in_flight: int
) -> list[float]:
    """Plan and launch ``batches`` on a GPU that is behind, let it catch up, and return the errors."""
    library.stream.behind = True
    scenes = [make_scene(lengths, seed=seed) for seed, lengths in enumerate(batches)]
    backend = scenes[0].make(FlashInferFA2, plans_in_flight=in_flight)
    outs = [torch.zeros(scene.q_RNH.shape) for scene in scenes]
    for scene, out in zip(scenes, outs, strict=True):
        scene.attend(backend, out=out)
    library.stream.synchronize()
    return [error(out, scene.expected()) for scene, out in zip(scenes, outs, strict=True)]


@pytest.mark.parametrize("in_flight", [2, 3])
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_a_plan_never_overwrites_one_that_the_gpu_has_not_copied(
    make_scene: MakeScene,
    library: Library,
    batches: list[list[tuple[int, int]]],
    in_flight: int,
) -> None:
    assert max(results_behind(make_scene, library, batches, in_flight)) < 1e-6


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_without_the_wait_a_plan_is_lost(
    make_scene: MakeScene,
    library: Library,
    batches: list[list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlanSlot, "wait", lambda self: None)
    assert max(results_behind(make_scene, library, batches, 2)) > 0.1


@pytest.mark.parametrize("in_flight", [2, 3])
def test_the_host_waits_only_for_a_plan_that_it_replaces(
    make_scene: MakeScene, library: Library, in_flight: int
) -> None:
    library.stream.behind = True
    scene = make_scene([(19, 6)])
    backend = scene.make(FlashInferFA2, plans_in_flight=in_flight)
    done = []
    for _ in range(in_flight + 2):
        backend.init_forward_metadata(scene.batch)
        done.append(library.stream.done)
    assert done == [0] * in_flight + [1, 2]


# Workspace


def workspace(library: Library) -> Tensor:
    """Return the workspace, which is the same for all wrappers."""
    addresses = {wrapper.workspace.data_ptr() for wrapper in library.wrappers}
    assert len(addresses) == 1
    return library.wrappers[0].workspace


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_workspace_is_as_large_as_asked_for(
    make_scene: MakeScene, library: Library, kernel: type[FlashInferBackend]
) -> None:
    make_scene([(0, 3)]).make(kernel, workspace_bytes=12345)
    found = workspace(library)
    assert (found.numel(), found.dtype, found.device.type) == (12345, torch.uint8, "cpu")


SPEC = AttentionSpec(
    num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, page_size=16, scale=0.1
)
LIMITS = BackendLimits(max_tokens=64, max_requests=4, max_context=128, num_pages=8)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("heads", "head_dim", "expected"),
    [
        # Two blocks a multiprocessor are 264; a tile is 128 rows of a head's elements and one more, 4 bytes each.
        ((32, 8), 128, 32 * 33 * 128 * 129 * 4 + 16 * MIB),
        ((64, 8), 128, 64 * 33 * 128 * 129 * 4 + 16 * MIB),
        ((128, 8), 128, 128 * 33 * 128 * 129 * 4 + 16 * MIB),
        # 264 blocks over 5 heads are 53.
        ((20, 5), 64, 20 * 53 * 128 * 65 * 4 + 16 * MIB),
        ((8, 8), 64, 32 * MIB),
    ],
    ids=str,
)
def test_the_workspace_of_fa2_holds_the_partial_results_of_the_shape(
    library: Library, heads: tuple[int, int], head_dim: int, expected: int
) -> None:
    spec = replace(SPEC, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    FlashInferFA2(spec, LIMITS, CPU)
    assert workspace(library).numel() == expected


def test_the_workspace_of_fa3_holds_no_partial_results(library: Library) -> None:
    FlashInferFA3(replace(SPEC, num_heads=128), LIMITS, CPU)
    assert workspace(library).numel() == 32 * MIB


# Choice of a kernel


@pytest.mark.parametrize(
    ("options", "capability", "kernel"),
    [
        ({}, (9, 0), FlashInferFA3),
        ({"kernel": "auto"}, (9, 0), FlashInferFA3),
        ({"kernel": "auto"}, (8, 0), FlashInferFA2),
        ({"kernel": "auto"}, (10, 0), FlashInferFA2),
        ({"kernel": "auto"}, None, FlashInferFA2),
        ({"kernel": "fa2"}, (9, 0), FlashInferFA2),
        ({"kernel": "fa3"}, (8, 0), FlashInferFA3),
        ({"kernel": "fa3"}, None, FlashInferFA3),
    ],
    ids=str,
)
def test_a_kernel_is_chosen(
    gpu: Gpu,
    options: dict[str, Any],
    capability: tuple[int, int] | None,
    kernel: type[FlashInferBackend],
) -> None:
    gpu(capability)
    assert FlashInferBackend.select(options) == (kernel, {})


@pytest.mark.parametrize("kernel", ["FA2", "cudnn", "", 2, None], ids=repr)
def test_an_unknown_kernel_is_refused(kernel: Any) -> None:
    with pytest.raises(BackendOptionError, match=f"kernel is fa2, fa3 or auto, not {kernel}"):
        FlashInferBackend.select({"kernel": kernel})


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_selects_itself(kernel: type[FlashInferBackend]) -> None:
    assert kernel.select({"workspace_bytes": 1}) == (kernel, {"workspace_bytes": 1})


@pytest.mark.parametrize(("kernel", "name"), [(FlashInferFA2, "fa2"), (FlashInferFA3, "fa3")])
def test_every_wrapper_is_told_the_kernel(
    make_scene: MakeScene, library: Library, kernel: type[FlashInferBackend], name: str
) -> None:
    make_scene([(0, 3)]).make(kernel)
    assert [wrapper.backend for wrapper in library.wrappers] == [name] * 4


def test_there_is_a_variant_a_kernel() -> None:
    chosen = [FlashInferBackend.select(options) for options in FlashInferBackend.variants()]
    assert chosen == [(kernel, {}) for kernel in KERNELS]


def test_options_reach_the_kernel(library: Library, gpu: Gpu) -> None:
    gpu((9, 0))
    capabilities = replace(FlashInferFA3.capabilities, devices=frozenset({"cpu"}))
    served = type("Served", (FlashInferFA3,), {"capabilities": capabilities})
    create_backend(served, SPEC, LIMITS, CPU, workspace_bytes=99, plans_in_flight=3)
    assert [wrapper.workspace.numel() for wrapper in library.paged] == [99] * 3


def test_an_option_that_no_kernel_takes_is_refused(library: Library, gpu: Gpu) -> None:
    gpu((9, 0))
    with pytest.raises(BackendOptionError, match="workspace_mib"):
        create_backend(FlashInferBackend, SPEC, LIMITS, CUDA, kernel="fa3", workspace_mib=1)


# Limits


def test_flashinfer_is_available_where_it_imports(library: Library) -> None:
    assert FlashInferBackend.unavailable() is None


@pytest.mark.parametrize("backend", [FlashInferBackend, *KERNELS])
def test_a_missing_flashinfer_is_named_with_its_hint(
    uninstall: Callable[..., None], backend: type[FlashInferBackend]
) -> None:
    uninstall("flashinfer")
    reason = backend.unavailable()
    assert reason == "flashinfer is not installed: pip install flashinfer-python"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 64}, None),
        ({"head_dim": 256}, None),
        ({"page_size": 1}, None),
        ({"page_size": 7}, None),
        ({"dtype": torch.float16}, None),
        ({"num_kv_heads": 32}, None),
        ({"head_dim": 80}, "head_dims: takes [64, 128, 256], not 80"),
        ({"head_dim": 96}, "head_dims: takes [64, 128, 256], not 96"),
        ({"dtype": torch.float32}, "dtypes: takes bfloat16, float16, not float32"),
    ],
    ids=str,
)
def test_declared_limits_are_kept(
    gpu: Gpu, kernel: type[FlashInferBackend], changes: dict[str, Any], reason: str | None
) -> None:
    gpu((9, 0))
    assert kernel.unsupported(replace(SPEC, **changes), CUDA) == reason


@pytest.mark.parametrize(
    ("kernel", "capability", "reason"),
    [
        (FlashInferFA2, (7, 5), "min_compute_capability: needs (8, 0), this GPU has (7, 5)"),
        (FlashInferFA2, (8, 0), None),
        (FlashInferFA2, (10, 0), None),
        (FlashInferFA3, (8, 9), "min_compute_capability: needs (9, 0), this GPU has (8, 9)"),
        (FlashInferFA3, (9, 0), None),
        (FlashInferFA3, (10, 0), "min_compute_capability: runs on compute capability 9.x only"),
    ],
)
def test_gpus_without_kernels_are_refused(
    gpu: Gpu,
    kernel: type[FlashInferBackend],
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    gpu(capability)
    assert kernel.unsupported(SPEC, CUDA) == reason


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_cpu_is_refused(kernel: type[FlashInferBackend]) -> None:
    assert kernel.unsupported(SPEC, CPU) == "devices: runs on cuda, not on cpu"


@pytest.mark.parametrize("failure", [RuntimeError("nvcc not found"), FileNotFoundError("ninja")])
def test_kernels_that_cannot_be_compiled_make_it_unavailable(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    backend = object.__new__(FlashInferFA2)
    monkeypatch.setattr(backend, "spec", "this shape", raising=False)

    def run(batch: PrefillBatch) -> None:
        raise failure

    with pytest.raises(BackendUnavailableError, match="CUDA_HOME") as caught:
        backend.warm_up([cast("PrefillBatch", None)], run)
    assert caught.value.__cause__ is failure
