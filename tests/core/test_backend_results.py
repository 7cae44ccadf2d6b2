"""What a backend returns is looked at before the first request, and what it raises says where.

Shape letters: N query heads, R real tokens, H head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import BackendContractError, Mode

Make = Callable[..., Any]


class MistakeError(Exception):
    """What user code raises here."""


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "heads_first": (lambda q: q.transpose(0, 1).contiguous(), r"returned \(4, 16, 8\) "),
    "a_row_more": (lambda q: torch.cat([q, q[:1]]), r"returned \(17, 4, 8\) "),
    "flat_heads": (lambda q: q.flatten(1), r"returned \(16, 32\) "),
    "dtype": (lambda q: q.double(), "torch.float64 on cpu, expected .* torch.float32"),
    "device": (lambda q: q.to("meta"), "on meta, expected .* on cpu"),
    "nothing": (lambda q: None, "returned NoneType, expected a tensor"),
    "a_pair": (lambda q: (q, None), "returned tuple, expected a tensor"),
}
EACH_WRONG = pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)


@pytest.fixture(params=[True, False], ids=["out", "no_out"])
def faulty(make_backend: Make, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return a function that makes a backend whose forward returns ``make(q)``."""

    def make_faulty(make: Callable[[Tensor], Any]) -> Any:
        backend = make_backend()
        backend.capabilities = replace(backend.capabilities, supports_out=request.param)
        backend.forward = lambda q_RNH, *rest: make(q_RNH)
        return backend

    return make_faulty


@EACH_WRONG
def test_a_wrong_result_fails_at_capture(
    make_runner: Make, faulty: Make, make: Callable[[Tensor], Any], message: str
) -> None:
    runner = make_runner(backend=faulty(make), captured=False)
    with pytest.raises(BackendContractError, match=message) as caught:
        runner.capture()
    assert caught.value.__notes__ == ["raised in warm-up of backend 'toy'"]
    assert runner.graphs == {}


@EACH_WRONG
def test_a_wrong_result_fails_at_a_switch(
    make_runner: Make,
    make_batch: Make,
    faulty: Make,
    make: Callable[[Tensor], Any],
    message: str,
) -> None:
    runner = make_runner()
    backend = runner.backend
    with pytest.raises(BackendContractError, match=message):
        runner.use_backend(faulty(make))
    assert runner.backend is backend
    assert runner.prefill(make_batch(3)).admission.bucket == 8


def test_a_result_that_has_to_be_copied_passes_the_warm_up(make_runner: Make, faulty: Make) -> None:
    runner = make_runner(backend=faulty(lambda q: q.clone()))
    assert sorted(runner.graphs) == [8, 16]
    assert runner.context.output_copies == 0  # of prefills


# What a backend raises


def fail_at(backend: Any, layer: int) -> None:
    def fail(at: int) -> None:
        if at == layer:
            raise MistakeError

    backend.before_forward = fail


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_an_exception_in_a_backend_names_layer_and_backend_in_every_mode(
    make_runner: Make, make_batch: Make, mode: Mode, layer: int
) -> None:
    runner = make_runner()
    fail_at(runner.backend, layer)
    with pytest.raises(MistakeError) as caught:
        runner.prefill(make_batch(3), mode=mode)
    assert caught.value.__notes__[0] == f"raised in layer {layer} of attention backend 'toy'"


def test_an_exception_in_a_warm_up_names_layer_and_backend(
    make_runner: Make, make_backend: Make
) -> None:
    runner, backend = make_runner(), make_backend()
    fail_at(backend, 0)
    with pytest.raises(MistakeError) as caught:
        runner.use_backend(backend)
    assert caught.value.__notes__ == [
        "raised in layer 0 of attention backend 'toy'",
        "raised in warm-up of backend 'toy'",
    ]
