"""The pointer guard: what a graph has baked in is where it was, or the replay is refused."""

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bcg_core import StaleTensorError, eager_on_graph
from bcg_core.debug import CaptureRecord, PointerGuard

Make = Callable[..., Any]


@pytest.fixture
def owner() -> SimpleNamespace:
    return SimpleNamespace(
        weight=torch.ones(4, 4),
        layers=[SimpleNamespace(scale=torch.ones(4))],
        tables={"cos": torch.ones(4)},
        unused=torch.ones(4),
    )


def forward(owner: SimpleNamespace, x: Tensor) -> Tensor:
    return (x @ owner.weight.t()) * owner.layers[0].scale + owner.tables["cos"]


@pytest.fixture
def graph(watched_capture: Make, owner: SimpleNamespace) -> Any:
    guard = PointerGuard({"owner": owner})
    x = torch.ones(2, 4)
    graph, _ = watched_capture(forward, owner, x, tools=[guard])
    graph.x = x
    return graph


def replace_weight(owner: SimpleNamespace) -> None:
    owner.weight = owner.weight.clone()


def replace_list_entry(owner: SimpleNamespace) -> None:
    owner.layers[0].scale = torch.ones(4)


def replace_mapping_entry(owner: SimpleNamespace) -> None:
    owner.tables["cos"] = torch.ones(4)


def replace_by_another_view(owner: SimpleNamespace) -> None:
    owner.weight = owner.weight.t()


def replace_by_another_dtype(owner: SimpleNamespace) -> None:
    owner.weight = owner.weight.double()


def replace_data(owner: SimpleNamespace) -> None:
    owner.weight.data = owner.weight.clone()


def delete(owner: SimpleNamespace) -> None:
    del owner.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_weight, r"owner\.weight was replaced after capture: address was 0x\w+ at capture"),
        (replace_data, r"owner\.weight was replaced after capture: address was 0x\w+ at capture"),
        (replace_list_entry, r"owner\.layers\[0\]\.scale was replaced"),
        (replace_mapping_entry, r"owner\.tables\['cos'\] was replaced"),
        (replace_by_another_dtype, r"dtype was torch\.float32 at capture, is torch\.float64 now"),
        (delete, r"owner\.weight is gone since capture"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_change_is_refused_by_name(
    graph: Any, owner: SimpleNamespace, change: Callable[[Any], None], message: str
) -> None:
    graph.replay()
    change(owner)
    with pytest.raises(StaleTensorError, match=message):
        graph.replay()


def test_another_geometry_of_the_same_memory_is_refused(
    watched_capture: Make,
) -> None:
    owner = SimpleNamespace(weight=torch.ones(4, 2))
    graph, _ = watched_capture(lambda: owner.weight * 2, tools=[PointerGuard({"owner": owner})])
    replace_by_another_view(owner)
    with pytest.raises(StaleTensorError, match=r"shape was \(4, 2\) .* stride was \(2, 1\)"):
        graph.replay()


def test_nothing_runs_when_a_replay_is_refused(
    watched_capture: Make, owner: SimpleNamespace
) -> None:
    x = torch.ones(2, 4)
    graph, result = watched_capture(forward, owner, x, tools=[PointerGuard({"owner": owner})])
    graph.replay()
    before = result.clone()
    x.fill_(3)
    replace_weight(owner)
    with pytest.raises(StaleTensorError):
        graph.replay()
    assert torch.equal(result, before)


def test_advice_is_given(graph: Any, owner: SimpleNamespace) -> None:
    replace_weight(owner)
    with pytest.raises(StaleTensorError, match="capture again, or copy new values into the old"):
        graph.replay()


def test_the_old_tensor_put_back_is_accepted(graph: Any, owner: SimpleNamespace) -> None:
    old = owner.weight
    replace_weight(owner)
    with pytest.raises(StaleTensorError):
        graph.replay()
    owner.weight = old
    graph.replay()


def test_an_update_in_place_is_accepted(graph: Any, owner: SimpleNamespace) -> None:
    owner.weight.mul_(2)
    graph.replay()


def test_what_no_segment_reads_may_be_replaced(graph: Any, owner: SimpleNamespace) -> None:
    owner.unused = torch.ones(4)
    owner.added = torch.ones(4)
    graph.replay()


def test_many_differences_are_counted(watched_capture: Make) -> None:
    owner = SimpleNamespace(weights=[torch.ones(2) for _ in range(9)])
    graph, _ = watched_capture(
        lambda: sum(weight * 2 for weight in owner.weights),
        tools=[PointerGuard({"owner": owner})],
    )
    owner.weights = [torch.ones(2) for _ in range(9)]
    with pytest.raises(StaleTensorError, match=r"weights\[3\].*; and 5 more"):
        graph.replay()


def test_a_parameter_of_a_module_is_named_as_it_is_written(watched_capture: Make) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
    graph, _ = watched_capture(module, torch.ones(4), tools=[PointerGuard({"model": module})])
    module[0].weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    with pytest.raises(StaleTensorError, match=r"model\.0\.weight was replaced"):
        graph.replay()


class Listing:
    """An owner that lists its weights under names of its own, as views of one fused tensor."""

    def __init__(self) -> None:
        self.fused = torch.ones(8, 4)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "layers.3.q_proj.weight", self.fused[:4]
        yield "layers.3.k_proj.weight", self.fused[4:]


def test_listed_weights_go_by_their_listed_names(watched_capture: Make) -> None:
    owner = Listing()
    graph, _ = watched_capture(
        lambda x: x @ owner.fused.t(), torch.ones(2, 4), tools=[PointerGuard({"model": owner})]
    )
    graph.replay()
    owner.fused = owner.fused.clone()
    with pytest.raises(StaleTensorError, match=r"^weight layers\.3\.q_proj\.weight was replaced"):
        graph.replay()


def test_a_listed_weight_counts_as_read_although_nobody_saw_it(watched_capture: Make) -> None:
    # What a kernel that torch.compile made reads is not seen.
    owner = Listing()
    graph, _ = watched_capture(lambda: torch.ones(4) * 2, tools=[PointerGuard({"model": owner})])
    owner.fused = owner.fused.clone()
    with pytest.raises(StaleTensorError, match="q_proj"):
        graph.replay()


def test_an_owner_that_holds_itself_is_followed_once(watched_capture: Make) -> None:
    owner = SimpleNamespace(weight=torch.ones(2))
    owner.myself = owner
    graph, _ = watched_capture(lambda: owner.weight * 2, tools=[PointerGuard({"owner": owner})])
    graph.replay()


def test_an_argument_of_a_break_that_is_moved_is_refused(watched_capture: Make) -> None:
    x = torch.ones(3)
    graph, _ = watched_capture(
        eager_on_graph(lambda x: None, name="look"), x, tools=[PointerGuard()]
    )
    graph.replay()
    x.set_(torch.ones(3))
    with pytest.raises(StaleTensorError, match=r"the argument of break 0 \(look\) was changed"):
        graph.replay()


def test_a_result_of_a_break_that_is_resized_is_refused(watched_capture: Make) -> None:
    results: list[Tensor] = []

    @eager_on_graph(name="two")
    def two() -> tuple[Tensor, Tensor]:
        results[:] = torch.ones(3), torch.zeros(3)
        return results[0], results[1]

    graph, _ = watched_capture(two, tools=[PointerGuard()])
    results[1].resize_(2)
    with pytest.raises(StaleTensorError, match=r"result of break 0 \(two\), tensor 1 was changed"):
        graph.replay()


def test_what_passes_through_breaks_is_accepted(watched_capture: Make) -> None:
    double = eager_on_graph(lambda x: x * 2)
    graph, result = watched_capture(
        lambda x: double(x + 1) + 1, torch.ones(3), tools=[PointerGuard()]
    )
    graph.replay()
    assert result.tolist() == [5, 5, 5]


def test_a_freed_tensor_without_a_name_is_refused_at_once() -> None:
    # The emulator keeps operands alive, which CUDA does not: so the record is written by hand.
    record = CaptureRecord()
    record.access(torch.ones(3), "aten::add.Tensor in segment 2")
    with pytest.raises(
        StaleTensorError, match=r"without a name, \(3,\) .* freed .*aten::add\.Tensor in segment 2"
    ):
        PointerGuard().captured(record)


def test_a_living_tensor_without_a_name_is_accepted(watched_capture: Make) -> None:
    graph, _ = watched_capture(lambda x: x + 1, torch.ones(3), tools=[PointerGuard()])
    graph.replay()


def test_only_the_geometry_of_a_tensor_is_no_use_of_it(watched_capture: Make) -> None:
    owner = SimpleNamespace(shape=torch.ones(3))
    graph, _ = watched_capture(
        lambda: (
            torch.zeros_like(owner.shape) + owner.shape.new_ones(3) + owner.shape.view(3).shape[0]
        ),
        tools=[PointerGuard({"owner": owner})],
    )
    owner.shape = torch.ones(3)
    graph.replay()


def test_a_graph_that_is_reset_frees_what_its_breaks_hold(watched_capture: Make) -> None:
    x = torch.ones(3)
    alive = weakref.ref(x)
    graph, _ = watched_capture(eager_on_graph(lambda x: None), x, tools=[PointerGuard()])
    graph.replay()
    del x
    graph.reset()
    gc.collect()
    assert alive() is None


# On a runner


def swap_weight(runner: Any) -> None:
    runner.model.qkv_DX[1] = runner.model.qkv_DX[1].clone()


def swap_rope_table(runner: Any) -> None:
    runner.model.table_S = runner.model.table_S.clone()


def swap_kv_storage(runner: Any) -> None:
    runner.kv_cache.storage_L2PSKH = runner.kv_cache.storage_L2PSKH.clone()


def swap_boundary_buffer(runner: Any) -> None:
    runner.workspace.boundary.qkv_MX = runner.workspace.boundary.qkv_MX.clone()


def swap_workspace(runner: Any) -> None:
    runner.workspace = type(runner.workspace)(runner.model.spec, runner.workspace.max_tokens)


def swap_model(runner: Any) -> None:
    runner.model = type(runner.model)()


@pytest.mark.parametrize(
    ("swap", "name"),
    [
        (swap_weight, r"model\.qkv_DX\[1\] was replaced"),
        (swap_rope_table, r"model\.table_S was replaced"),
        (swap_kv_storage, r"kv_cache\.storage_L2PSKH was replaced"),
        (swap_boundary_buffer, r"workspace\.boundary\.qkv_MX was replaced"),
        (swap_workspace, r"workspace\.boundary\.qkv_MX was replaced"),
        (swap_model, r"model\.embedding_VD was replaced"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_runner_refuses_to_replay_after_a_swap(
    make_watched: Make, make_batch: Make, swap: Callable[[Any], None], name: str
) -> None:
    runner = make_watched(tools=[PointerGuard()])
    runner.prefill(make_batch(3, 4))
    swap(runner)
    with pytest.raises(StaleTensorError, match=name):
        runner.prefill(make_batch(3, 4))


def test_a_runner_that_captures_again_after_a_swap_replays(
    make_watched: Make, make_batch: Make
) -> None:
    runner = make_watched(tools=[PointerGuard()])
    swap_weight(runner)
    runner.release()
    runner.capture()
    assert runner.prefill(make_batch(3, 4)).admission.bucket == 8


def test_a_runner_may_switch_its_backend(
    make_watched: Make, make_batch: Make, make_backend: Make
) -> None:
    runner = make_watched(tools=[PointerGuard()])
    runner.use_backend(make_backend())
    assert runner.prefill(make_batch(3, 4)).admission.bucket == 8
