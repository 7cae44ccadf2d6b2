"""The SDPA backend against attention in float64.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from bcg_backends.sdpa import RequestRows, SDPABackend
from bcg_core import AttentionSpec, BackendLimits
from bcg_harness.testing.ambient_states import PUT_ASIDE

MakeScene = Callable[..., Any]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]
# A few roundings of the result's type on top of float32 accumulation.
BUDGETS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

CASES: dict[str, list[tuple[int, int]]] = {
    "one_token": [(0, 1)],
    "one_request": [(0, 37)],
    "two_requests": [(0, 8), (0, 5)],
    "prefix_of_1": [(1, 6)],
    "prefix_of_127": [(127, 6)],
    "prefix_of_128": [(128, 6)],
    "one_token_behind_a_prefix": [(40, 1)],
    "a_page_exactly": [(16, 16)],
    "longer_than_the_prefix": [(3, 50)],
    "mixed": [(0, 3), (127, 1), (128, 4), (1, 1), (0, 1), (17, 8)],
    "many_requests": [(n % 5, 1 + n % 3) for n in range(64)],
}


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


# Values


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_attention_is_within_budget_of_float64(
    make_scene: MakeScene, device: str, lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    scene = make_scene(lengths, dtype=dtype, device=device)
    assert error(scene.attend(scene.make(SDPABackend)), scene.expected()) < BUDGETS[dtype]


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1), (1, 1), (9, 3)], ids=str)
def test_head_layouts_are_within_budget_of_float64(
    make_scene: MakeScene,
    device: str,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    scene = make_scene(
        [(0, 5), (19, 6)], heads=heads, head_dim=head_dim, dtype=dtype, device=device
    )
    assert error(scene.attend(scene.make(SDPABackend)), scene.expected()) < BUDGETS[dtype]


@pytest.mark.parametrize("head_dim", [1, 7, 20, 300])
def test_any_head_dim_is_served_on_the_cpu(make_scene: MakeScene, head_dim: int) -> None:
    scene = make_scene([(0, 5), (19, 6)], head_dim=head_dim)
    assert error(scene.attend(scene.make(SDPABackend)), scene.expected()) < 4e-6


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_any_page_size_is_served(make_scene: MakeScene, device: str, page_size: int) -> None:
    scene = make_scene([(0, 5), (19, 6), (40, 1)], page_size=page_size, device=device)
    assert error(scene.attend(scene.make(SDPABackend)), scene.expected()) < 4e-6


def test_each_layer_reads_its_own_keys_and_values(make_scene: MakeScene, device: str) -> None:
    scene = make_scene([(19, 6)], device=device)
    backend = scene.make(SDPABackend)
    assert error(scene.attend(backend, layer=1), scene.expected(layer=1)) < 4e-6
    assert error(scene.attend(backend, layer=1), scene.expected(layer=0)) > 0.1


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_the_scale_of_the_spec_is_applied(make_scene: MakeScene, device: str, scale: float) -> None:
    scene = make_scene([(0, 5), (19, 6)], device=device)
    scene = replace(scene, spec=replace(scene.spec, scale=scale))
    assert error(scene.attend(scene.make(SDPABackend)), scene.expected()) < 1e-5


# Alignment, with values that name their token: where all logits are equal, the result is their mean


def mean_positions(scene: Any) -> list[float]:
    """Attend with zero queries over values that are their position; return a number for each row."""
    scene.q_RNH.zero_()
    positions = torch.cat([torch.arange(float(n)) for n in scene.batch.kv_lens])
    values = scene.kv_cache.flat(0)[1]
    values[scene.batch.kv_slots] = positions[:, None, None].to(values)
    scene.v_RKH.copy_(values[scene.batch.slot_mapping_R.to(values.device)])
    return scene.attend(scene.make(SDPABackend))[:, 0, 0].tolist()


def test_without_a_prefix_a_token_sees_those_up_to_itself(
    make_scene: MakeScene, device: str
) -> None:
    assert mean_positions(make_scene([(0, 4)], device=device)) == pytest.approx([0, 0.5, 1, 1.5])


@pytest.mark.parametrize("prefix", [1, 10, 127, 128])
def test_behind_a_prefix_the_mask_is_aligned_bottom_right(
    make_scene: MakeScene, device: str, prefix: int
) -> None:
    expected = [(prefix + i) / 2 for i in range(4)]
    assert mean_positions(make_scene([(prefix, 4)], device=device)) == pytest.approx(expected)


def test_a_single_token_sees_its_whole_prefix(make_scene: MakeScene, device: str) -> None:
    assert mean_positions(make_scene([(100, 1)], device=device)) == pytest.approx([50])


def test_requests_see_their_own_tokens_alone(make_scene: MakeScene, device: str) -> None:
    found = mean_positions(make_scene([(0, 2), (10, 1), (0, 1)], device=device))
    assert found == pytest.approx([0, 0.5, 5, 0])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("prefix", [0, 9])
def test_query_heads_read_the_kv_head_of_their_group(
    make_scene: MakeScene, device: str, heads: tuple[int, int], prefix: int
) -> None:
    scene = make_scene([(prefix, 3)], heads=heads, device=device)
    group = heads[0] // heads[1]
    numbers = torch.arange(float(heads[1]), device=device)[:, None]
    scene.kv_cache.flat(0)[1][scene.batch.kv_slots] = numbers
    scene.v_RKH.copy_(numbers.expand(scene.v_RKH.shape))
    found = scene.attend(scene.make(SDPABackend))[-1, :, 0].tolist()
    assert found == pytest.approx([head // group for head in range(heads[0])])


# Memory


def test_a_result_has_the_shape_and_dtype_of_the_queries(
    make_scene: MakeScene, device: str
) -> None:
    scene = make_scene([(0, 3), (5, 2)], dtype=torch.bfloat16, device=device)
    result = scene.attend(scene.make(SDPABackend))
    assert (result.shape, result.dtype) == (scene.q_RNH.shape, torch.bfloat16)
    assert result.device == scene.q_RNH.device


@pytest.mark.parametrize("lengths", [[(0, 5)], [(19, 6)], [(0, 5), (19, 6)]], ids=str)
def test_slots_of_others_do_not_leak(
    make_scene: MakeScene, device: str, lengths: list[tuple[int, int]]
) -> None:
    scene = make_scene(lengths, device=device)
    others = torch.ones(scene.kv_cache.num_slots, dtype=torch.bool, device=device)
    others[scene.batch.kv_slots] = False
    for side in scene.kv_cache.flat(0):
        side[others] = float("nan")
    assert scene.attend(scene.make(SDPABackend)).isfinite().all()


@pytest.mark.parametrize("allowed", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_the_kernel_is_not_the_one_that_the_caller_allows(
    make_scene: MakeScene, device: str, allowed: str
) -> None:
    scene = make_scene(CASES["mixed"], dtype=torch.bfloat16, device=device)
    backend = scene.make(SDPABackend)
    with sdpa_kernel(getattr(SDPBackend, allowed)):
        result = scene.attend(backend)
    assert torch.equal(result, scene.attend(backend))


@pytest.mark.parametrize("state", ["set_default_device", "with_device", "default_float64"])
def test_metadata_is_made_where_and_what_it_must_be(make_scene: MakeScene, state: str) -> None:
    scene = make_scene(CASES["mixed"])
    result = PUT_ASIDE[state](lambda: scene.attend(scene.make(SDPABackend)))
    assert torch.equal(result, scene.attend(scene.make(SDPABackend)))


class Passive(TorchDispatchMode):
    """Run everything as it is, as a debug tool around a break does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_prefix_is_served_below_a_dispatch_mode(make_scene: MakeScene, device: str) -> None:
    scene = make_scene([(20, 6)], device=device)
    backend = scene.make(SDPABackend)
    metadata = backend.init_forward_metadata(scene.batch)
    with Passive():
        result = scene.attend(backend, metadata=metadata)
    assert torch.equal(result, scene.attend(backend))


def test_nothing_that_is_given_is_written(make_scene: MakeScene, device: str) -> None:
    scene = make_scene([(0, 5), (19, 6)], device=device)
    given = [scene.q_RNH, scene.k_RKH, scene.v_RKH, scene.kv_cache.storage_L2PSKH[:, :, 1:]]
    before = [tensor.clone() for tensor in given]
    scene.attend(scene.make(SDPABackend))
    assert all(map(torch.equal, given, before))


def test_the_same_call_gives_the_same_bits(make_scene: MakeScene, device: str) -> None:
    scene = make_scene(CASES["mixed"], dtype=torch.bfloat16, device=device)
    backend = scene.make(SDPABackend)
    assert torch.equal(scene.attend(backend), scene.attend(backend))


# Metadata


def test_metadata_says_where_rows_and_slots_of_each_request_are(make_scene: MakeScene) -> None:
    scene = make_scene([(0, 3), (5, 2), (0, 1)], page_size=4)
    first, second, third = scene.make(SDPABackend).init_forward_metadata(scene.batch)
    assert first == RequestRows(new=slice(0, 3), slots_S=None)
    assert third == RequestRows(new=slice(5, 6), slots_S=None)
    assert second.new == slice(3, 5)
    # Pages 1; 2 and 3, in reverse; 4.
    assert second.slots_S is not None
    assert second.slots_S.tolist() == [12, 13, 14, 15, 8, 9, 10]
    assert second.slots_S.dtype == torch.int64


def test_there_is_no_metadata_of_a_bucket(make_scene: MakeScene) -> None:
    scene = make_scene([(0, 3)])
    assert scene.make(SDPABackend).init_bucket_metadata(8) is None


# Limits

SPEC = AttentionSpec(
    num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32, page_size=16, scale=0.125
)


def refusal(device: str, **changes: Any) -> str | None:
    return SDPABackend.unsupported(replace(SPEC, **changes), torch.device(device))


def test_torch_alone_is_enough() -> None:
    assert SDPABackend.unavailable() is None


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_dims_that_are_multiples_of_8_up_to_256_are_served_on_cuda(
    head_dim: int, dtype: torch.dtype
) -> None:
    assert refusal("cuda", head_dim=head_dim, dtype=dtype) is None


@pytest.mark.parametrize("head_dim", [1, 20, 63, 100, 264, 512])
def test_other_head_dims_are_refused_on_cuda(head_dim: int) -> None:
    expected = f"head_dims: takes multiples of 8 up to 256, not {head_dim}"
    assert refusal("cuda", head_dim=head_dim) == expected


@pytest.mark.parametrize("head_dim", [1, 20, 63, 64, 264])
def test_any_head_dim_is_supported_on_the_cpu(head_dim: int) -> None:
    assert refusal("cpu", head_dim=head_dim) is None


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        ("mps", {}, "devices: runs on cpu, cuda, not on mps"),
        ("cpu", {"dtype": torch.float64}, "dtypes: takes bfloat16, float16, float32, not float64"),
        ("cuda", {"dtype": torch.float64}, "dtypes: takes"),
    ],
    ids=["device", "dtype", "dtype_on_cuda"],
)
def test_declared_limits_are_kept(device: str, changes: dict[str, Any], message: str) -> None:
    assert str(refusal(device, **changes)).startswith(message)


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [
        (torch.bfloat16, [True, False]),
        (torch.float16, [True, False]),
        (torch.float32, [False, True]),
    ],
    ids=["bf16", "fp16", "fp32"],
)
def test_on_cuda_the_kernel_is_pinned_and_is_not_cudnn(
    dtype: torch.dtype, allowed: list[bool]
) -> None:
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype, page_size=16, scale=0.125
    )
    limits = BackendLimits(max_tokens=8, max_requests=1, max_context=8, num_pages=2)
    cuda = torch.backends.cuda
    with SDPABackend(spec, limits, torch.device("cuda"))._kernel():
        assert not cuda.cudnn_sdp_enabled()
        assert not cuda.math_sdp_enabled()
        assert [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()] == allowed
