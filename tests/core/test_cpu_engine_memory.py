"""Tensors that are given other memory after a capture: replays go on with the old, as those of CUDA graphs do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bcg_core import CaptureError, Mode, eager_on_graph

Capture = Callable[..., Any]
Make = Callable[..., Any]


def linear() -> nn.Linear:
    layer = nn.Linear(3, 3, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.arange(9.0).view(3, 3))
    return layer


def replace_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.ones(3, 3)


def set_to_another(layer: nn.Linear) -> None:
    layer.weight.set_(torch.ones(3, 3))


def swap(layer: nn.Linear) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(3, 3), requires_grad=False))


def halve(layer: nn.Linear) -> None:
    layer.half()


def convert(layer: nn.Linear) -> None:
    layer.to(torch.float64)


def apply(layer: nn.Linear) -> None:
    layer._apply(lambda weight: weight + 1)


def transpose(layer: nn.Linear) -> None:
    layer.weight.t_()


def assign_state(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.ones(3, 3)}, assign=True)


REPLACEMENTS: dict[str, Callable[[nn.Linear], None]] = {
    "data": replace_data,
    "set_": set_to_another,
    "swap_tensors": swap,
    "half": halve,
    "to": convert,
    "apply": apply,
    "t_": transpose,
    "load_state_dict_assigns": assign_state,
}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_weight_that_is_replaced_is_not_followed(
    capture: Capture, replace: Callable[[nn.Linear], None]
) -> None:
    layer, x = linear(), torch.ones(2, 3)
    graph, y = capture(layer, x)
    graph.replay()
    before = y.clone()
    replace(layer)
    y.zero_()
    graph.replay()
    assert torch.equal(y, before)


UPDATES: dict[str, Callable[[nn.Linear], Any]] = {
    "mul_": lambda layer: layer.weight.mul_(2),
    "data_copy_": lambda layer: layer.weight.data.copy_(torch.ones(3, 3)),
    "detach_copy_": lambda layer: layer.weight.detach().copy_(torch.ones(3, 3)),
    "row": lambda layer: layer.weight[0].fill_(7),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": torch.ones(3, 3)}),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_a_weight_that_is_updated_in_place_is_followed(
    capture: Capture, update: Callable[[nn.Linear], Any], mode: Callable[[], Any]
) -> None:
    layer, x = linear(), torch.ones(2, 3)
    with mode():
        graph, y = capture(layer, x)
    with torch.no_grad():
        update(layer)
        graph.replay()
        assert torch.equal(y, layer(x))


def test_the_old_memory_is_followed_after_a_replacement(capture: Capture) -> None:
    layer, x = linear(), torch.ones(2, 3)
    old = layer.weight.data
    graph, y = capture(layer, x)
    replace_data(layer)
    old.fill_(2)
    graph.replay()
    assert torch.equal(y, torch.full((2, 3), 6.0))


def test_a_write_goes_to_the_old_memory(capture: Capture) -> None:
    x = torch.zeros(3)
    old = x.data
    graph, _ = capture(lambda: x.add_(1))
    x.data = torch.full((3,), 5.0)
    graph.replay()
    assert (old.tolist(), x.tolist()) == ([1, 1, 1], [5, 5, 5])


def test_an_out_goes_to_the_old_memory(capture: Capture) -> None:
    x, out = torch.ones(3), torch.zeros(3)
    old = out.data
    graph, _ = capture(lambda: torch.add(x, 1, out=out))
    out.data = torch.full((3,), 5.0)
    graph.replay()
    assert (old.tolist(), out.tolist()) == ([2, 2, 2], [5, 5, 5])


def test_a_result_that_is_replaced_is_computed_where_it_was(capture: Capture) -> None:
    x = torch.ones(3)
    graph, (y, z) = capture(lambda: ((y := x + 1), y * 10))
    y.data = torch.full((3,), 5.0)
    graph.replay()
    assert (y.tolist(), z.tolist()) == ([5, 5, 5], [20, 20, 20])


def test_tensors_in_a_list_of_operands_are_not_followed(capture: Capture) -> None:
    parts = [torch.ones(1), torch.zeros(1)]
    graph, y = capture(lambda: torch.cat(parts))
    parts[0].data = torch.full((1,), 5.0)
    graph.replay()
    assert y.tolist() == [1, 0]


def test_a_replacement_inside_a_segment_takes_effect_there(capture: Capture) -> None:
    x, other = torch.ones(3), torch.full((3,), 5.0)

    def run() -> tuple[Tensor, Tensor]:
        before = x + 1
        x.data = other
        return before, x + 1

    graph, (before, after) = capture(run)
    graph.replay()
    assert (before.tolist(), after.tolist()) == ([2, 2, 2], [6, 6, 6])


def test_a_replacement_in_a_break_is_seen_by_breaks_alone(capture: Capture) -> None:
    x, values = torch.ones(3), iter([2.0, 3.0])
    seen: list[list[float]] = []

    @eager_on_graph
    def replace() -> None:
        x.data = torch.full((3,), next(values))

    @eager_on_graph
    def look() -> None:
        seen.append(x.tolist())

    graph, y = capture(lambda: (replace(), look(), x * 10)[2])
    graph.replay()
    assert seen == [[2, 2, 2], [3, 3, 3]]
    assert y.tolist() == [20, 20, 20]


def test_conjugate_and_negative_operands_stay_so(capture: Capture) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    conjugate, negative = z.conj(), z.conj().imag
    graph, results = capture(lambda: (conjugate * 1, negative * 1))
    z.mul_(2)
    graph.replay()
    torch.testing.assert_close(results, (z.conj() * 1, z.conj().imag * 1))


def enlarge(x: Tensor) -> None:
    x.resize_(1000)


def free(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


@pytest.mark.parametrize("resize", [enlarge, free], ids=lambda resize: resize.__name__)
def test_memory_that_is_resized_is_refused_before_anything_runs(
    capture: Capture, resize: Callable[[Tensor], None]
) -> None:
    x, count = torch.ones(3), torch.zeros(1)
    graph, _ = capture(lambda: (count.add_(1), x * 2))
    resize(x)
    with pytest.raises(CaptureError, match=r"had 12 bytes at capture and has \d+ now"):
        graph.replay()
    assert count.item() == 0


def test_a_result_that_a_break_resizes_is_refused(capture: Capture) -> None:
    sizes = iter([3, 1000])

    @eager_on_graph
    def resize(y: Tensor) -> None:
        y.resize_(next(sizes))

    def run(x: Tensor) -> Tensor:
        y = x + 1
        resize(y)
        return y * 2

    graph, _ = capture(run, torch.ones(3))
    with pytest.raises(CaptureError, match="had 12 bytes at capture and has 4000 now"):
        graph.replay()


def test_a_model_that_replaces_the_data_of_a_weight_differs_from_eager(
    make_runner: Make, make_batch: Make
) -> None:
    runner, batch = make_runner(), make_batch(3, 4)
    before = runner.prefill(batch).logits_BV
    runner.model.qkv_DX[0].data = runner.model.qkv_DX[0] * 1.5
    replayed = runner.prefill(batch).logits_BV
    assert torch.equal(replayed, before)
    assert not torch.equal(replayed, runner.prefill(batch, mode=Mode.PADDED_EAGER).logits_BV)
