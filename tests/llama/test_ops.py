"""Compiled element-wise functions: the same results, one kernel for all token counts, one set per model."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_llama import PRESETS, ElementwiseOps, random_llama

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None,
        reason="torch.compile on the CPU needs a C++ compiler",
    ),
    # torch 2.13 warns about itself when torch.compile's default backend is first imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

COLUMNS = 32
Call = Callable[[ElementwiseOps, int], tuple[Tensor, ...]]


def norm(ops: ElementwiseOps, tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (
        ops.rms_norm(torch.randn(tokens, COLUMNS).bfloat16(), torch.rand(COLUMNS).bfloat16(), 1e-5),
    )


def add_norm(ops: ElementwiseOps, tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, y = torch.randn(2, tokens, COLUMNS).bfloat16()
    return ops.add_rms_norm(x, y, torch.rand(COLUMNS).bfloat16(), 1e-5)


def rotate(ops: ElementwiseOps, tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rows, angles = torch.randn(tokens, 5, 8).bfloat16(), torch.randn(tokens, 4)
    ops.rotate_(rows[:, :3], angles.cos(), angles.sin())
    return (rows,)


def silu(ops: ElementwiseOps, tokens: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (ops.silu_mul(torch.randn(tokens, COLUMNS).bfloat16()),)


ALL = [norm, add_norm, rotate, silu]


@pytest.fixture(scope="module")
def compiled() -> ElementwiseOps:
    return ElementwiseOps.compiled()


@pytest.fixture
def no_compilation() -> Iterator[Callable[[], None]]:
    """Return a function after which any compilation is an error, until the test ends."""
    yield lambda: torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("tokens", [1, 7, COLUMNS])
@pytest.mark.parametrize("call", ALL)
def test_compiled_equals_plain(call: Call, tokens: int, compiled: ElementwiseOps) -> None:
    plain = call(ElementwiseOps.plain(), tokens)
    # Plain code rounds to bfloat16 between its steps, compiled code does not: a few rounding steps.
    rtol = 4 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(call(compiled, tokens), plain, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("call", ALL)
def test_token_counts_share_one_compilation(call: Call, no_compilation: Callable[[], None]) -> None:
    ops = ElementwiseOps.compiled()
    call(ops, COLUMNS)  # equal sizes must not be taken for one size
    no_compilation()
    assert len(call(ops, 8)[0]) == 8


def test_models_do_not_share_compilations(
    compiled: ElementwiseOps, no_compilation: Callable[[], None]
) -> None:
    silu(compiled, 8)
    other = ElementwiseOps.compiled()
    no_compilation()
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        silu(other, 8)


def test_layers_share_one_compilation(ids: Tensor, logits: Any) -> None:
    counters = torch._dynamo.utils.counters["stats"]
    model = random_llama(PRESETS["tiny"], fuse=True)
    before = counters["unique_graphs"]
    logits(model, ids)
    logits(model, ids[:64])
    assert counters["unique_graphs"] == before + len(ALL)


def test_fused_model_equals_plain_model(ids: Tensor, logits: Any, error_of: Any) -> None:
    plain, fused = (random_llama(PRESETS["tiny"], fuse=fuse) for fuse in (False, True))
    assert error_of(logits(fused, ids), logits(plain, ids)) <= 1e-5


def test_functions_are_plain_inside_another_compilation(compiled: ElementwiseOps) -> None:
    outer = torch.compile(lambda x: compiled.silu_mul(x) + 1, fullgraph=True)
    x = torch.randn(4, 64)
    torch.testing.assert_close(outer(x), ElementwiseOps.plain().silu_mul(x) + 1)
