"""What a capture on CUDA records and what it refuses, as operations to try on an engine.

Every operation is called with ``x``, ``[3, 4]`` float32 from 1 to 12, and ``i``, int64 ``[2, 0, 1]``, both on the
engine's device. Whoever tries one on CUDA should do so in a process of its own: a refused capture is hard on it.
"""

import copy
import io
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from bcg_core import BreakableCUDAGraph, BreakableCUDAGraphCapture, SegmentEngine, engine_for

Run = Callable[[Any, Any], Any]


seeds = count(314159)
"""Numbers that nothing was seeded with: CUDA lets the seed pass that is there already, and does nothing."""


class Outcome(Enum):
    """Tell what became of a capture."""

    RECORDED = "recorded"
    """It replays right on new inputs."""
    REFUSED = "refused"
    """It raised."""


def set_item(x: Tensor, key: Any, value: Any) -> Tensor:
    """Return a copy of ``x`` in which ``value`` is assigned to ``key``."""
    x = x.clone()
    x[key] = value
    return x


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator for ``device``."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def seeded_for_a_while(x: Tensor) -> Tensor:
    """Draw as if freshly seeded, and leave the generators as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(next(seeds))
        return torch.rand_like(x)


HOST_READS: Mapping[str, Run] = MappingProxyType(
    {
        "item": lambda x, i: x.sum().item(),
        "item_of_an_input": lambda x, i: x[0, 0].item(),
        "bool": lambda x, i: bool(x.sum()),
        "if": lambda x, i: 1 if x.sum() > 0 else 2,
        "int": lambda x, i: int(x.sum()),
        "float": lambda x, i: float(x.sum()),
        "complex": lambda x, i: complex(x.sum()),
        "index": lambda x, i: range(x.sum().long()),
        "is_nonzero": lambda x, i: torch.is_nonzero(x.sum()),
        "contains": lambda x, i: 3.0 in x,
        "tensor_in_a_list": lambda x, i: x.sum() in [x.amax(), x.amin()],
        "max_as_python_does": lambda x, i: max(x[0]),
        "nonzero": lambda x, i: x.nonzero(),
        "nonzero_as_tuple": lambda x, i: x.nonzero(as_tuple=True),
        "argwhere": lambda x, i: torch.argwhere(x),
        "where_with_one_argument": lambda x, i: torch.where(x > 2),
        "index_by_mask": lambda x, i: x[x > 2],
        "index_by_mask_and_integers": lambda x, i: x[x[:, 0] > 2, i[:1]],
        "index_by_bytes": lambda x, i: x[(x > 2).to(torch.uint8)],
        "index_by_a_number_on_the_device": lambda x, i: x[: i[0]],
        "setitem_mask_tensor": lambda x, i: set_item(x, x > 8, x[0]),
        "setitem_mask_and_integers": lambda x, i: set_item(x, (x[:, 0] > 2, i[:1]), 0.0),
        "index_put_of_one_element_by_mask": lambda x, i: x.index_put((x > 2,), x[0, :1]),
        "index_put_by_mask": lambda x, i: x.index_put((x > 8,), x[0]),
        "index_put_accumulating_by_mask": lambda x, i: x.index_put(
            (x > 2,), x[0, 0], accumulate=True
        ),
        "masked_select": lambda x, i: x.masked_select(x > 2),
        "unique": lambda x, i: x.unique(),
        "unique_consecutive": lambda x, i: x.unique_consecutive(),
        "isin_of_many": lambda x, i: torch.isin(x, torch.arange(100, device=x.device)),
        "bincount": lambda x, i: i.bincount(),
        "histc_without_a_range": lambda x, i: torch.histc(x),
        "one_hot_without_a_number": lambda x, i: F.one_hot(i),
        "repeat_interleave_by_tensor": lambda x, i: x.repeat_interleave(i, dim=0),
        "combinations": lambda x, i: torch.combinations(x[0]),
        "arange_to_tensor": lambda x, i: torch.arange(x.sum()),
        "full_of_tensor": lambda x, i: torch.full((2,), x.sum()),
        "alpha_is_a_tensor": lambda x, i: torch.add(x, x, alpha=x.sum()),
        "equal": lambda x, i: torch.equal(x, x + 1),
        "allclose": lambda x, i: torch.allclose(x, x),
        "tolist": lambda x, i: x.tolist(),
        "numpy": lambda x, i: x.numpy(),
        "cpu": lambda x, i: x.cpu(),
        "print": lambda x, i: print(x),
        "repr": lambda x, i: repr(x),
        "format": lambda x, i: f"{x}",
        "format_number": lambda x, i: f"{x.sum():.3f}",
        "inverse": lambda x, i: torch.linalg.inv(x[:2, :2]),
        "solve": lambda x, i: torch.linalg.solve(x[:2, :2], x[:2, 2]),
        "cholesky": lambda x, i: torch.linalg.cholesky(torch.eye(3, device=x.device)),
        "svd": lambda x, i: torch.linalg.svd(x),
        "eigh": lambda x, i: torch.linalg.eigh(x[:3, :3]),
        "eig": lambda x, i: torch.linalg.eig(x[:3, :3]),
        "pinv": lambda x, i: torch.linalg.pinv(x),
        "matrix_rank": lambda x, i: torch.linalg.matrix_rank(x),
        "matrix_exp": lambda x, i: torch.linalg.matrix_exp(x[:3, :3] / 9),
        "normal_of_a_tensor_of_deviations": lambda x, i: torch.normal(0.0, x),
        "distribution_that_checks_its_arguments": lambda x, i: torch.distributions.Categorical(
            logits=x,
            validate_args=True,  # by default it does, until dynamo is imported
        ).sample(),
        "to_sparse": lambda x, i: x.to_sparse(),
    }
)
"""Read a value on the host, openly or not."""

HOST_DATA: Mapping[str, Run] = MappingProxyType(
    {
        "tensor_on_the_device": lambda x, i: torch.tensor([1.0, 2.0], device=x.device),
        "number_on_the_device": lambda x, i: torch.tensor(3.0, device=x.device),
        "as_tensor_on_the_device": lambda x, i: torch.as_tensor([1, 2], device=x.device),
        "asarray_on_the_device": lambda x, i: torch.asarray(3.0, device=x.device),
        "new_tensor": lambda x, i: x.new_tensor([1, 2]),
        "new_tensor_of_a_number": lambda x, i: x.new_tensor(3.0),
        "index_by_a_list": lambda x, i: x[[0, 1]],
        "masked_mean": lambda x, i: torch.masked.mean(x, mask=x > 2),
    }
)
"""Copy something from the host to the device, which waits for it."""

SEEDING: Mapping[str, Run] = MappingProxyType(
    {
        "manual_seed": lambda x, i: torch.manual_seed(next(seeds)),
        "manual_seed_and_draw": lambda x, i: (torch.manual_seed(next(seeds)), torch.rand_like(x))[
            1
        ],
        "manual_seed_of_the_generator": lambda x, i: generator_of(x.device).manual_seed(
            next(seeds)
        ),
        "seed_of_the_generator": lambda x, i: generator_of(x.device).seed(),
        "set_state_of_the_generator": lambda x, i: generator_of(x.device).set_state(
            torch.Generator(x.device).manual_seed(next(seeds)).get_state()
        ),
        "seed": lambda x, i: torch.seed(),
        "fork_rng": lambda x, i: seeded_for_a_while(x),
    }
)
"""Seed the default generator, or set its state."""

RECORDED: Mapping[str, Run] = MappingProxyType(
    {
        "vector_by_matrix": lambda x, i: x[0] @ x.t(),
        "vector_by_matrices": lambda x, i: x[0] @ x.t().expand(2, 4, 3),
        "matrix_by_vector": lambda x, i: x @ x[0],
        "matrices_by_vector": lambda x, i: x.expand(2, 3, 4) @ x[0],
        "vector_by_vector": lambda x, i: x[0] @ x[1],
        "einsum": lambda x, i: torch.einsum("td,sd->ts", x, x),
        "einsum_of_a_vector": lambda x, i: torch.einsum("t,td->d", x[:, 0], x),
        "linear": lambda x, i: F.linear(x, x, x[:, 0]),
        "attention": lambda x, i: F.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None], is_causal=True
        ),
        "attention_with_a_mask": lambda x, i: F.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None], attn_mask=i[:, None] >= i
        ),
        "layer_norm": lambda x, i: F.layer_norm(x, (4,)),
        "rms_norm": lambda x, i: F.rms_norm(x, (4,)),
        "conv1d": lambda x, i: F.conv1d(x[None], x[:, None, :2], groups=3),
        "softplus": lambda x, i: F.softplus(x),
        "softmax": lambda x, i: x.softmax(-1),
        "cross_entropy": lambda x, i: F.cross_entropy(x, i),
        "embedding": lambda x, i: F.embedding(i, x),
        "one_hot": lambda x, i: F.one_hot(i, 5),
        "one_hot_by_name": lambda x, i: F.one_hot(i, num_classes=3),
        "rows": lambda x, i: x[i],
        "columns": lambda x, i: x[:, i],
        "broadcast": lambda x, i: x[i[:, None], i],
        "setitem_integers": lambda x, i: set_item(x, i, x * 2),
        "embedding_with_a_largest_norm": lambda x, i: F.embedding(i, x.clone(), max_norm=1.0),
        "setitem_mask_number": lambda x, i: set_item(x, x > 2, 0.0),
        "index_put_accumulating": lambda x, i: x.index_put((i,), x, accumulate=True),
        "index_add": lambda x, i: x.index_add(0, i, x),
        "index_copy": lambda x, i: x.index_copy(0, i, x),
        "scatter": lambda x, i: x.scatter(0, i[:, None], x),
        "scatter_add": lambda x, i: x.scatter_add(0, i[:, None], x),
        "gather": lambda x, i: x.gather(0, i[:, None]),
        "take": lambda x, i: x.take(i),
        "masked_fill": lambda x, i: x.masked_fill(x > 2, 0.0),
        "masked_scatter": lambda x, i: x.masked_scatter(x > 2, x * 2),
        "where": lambda x, i: torch.where(x > 2, x, 0.0),
        "mask_as_weight": lambda x, i: x * (x > 2),
        "repeat_interleave_of_a_known_size": lambda x, i: x.repeat_interleave(
            i, dim=0, output_size=3
        ),
        "isin_of_few": lambda x, i: torch.isin(i, i[:1]),
        "isin_of_a_number": lambda x, i: torch.isin(i, 2),
        "histc_with_a_range": lambda x, i: torch.histc(x, 4, 0, 13),
        "sort": lambda x, i: x.sort(),
        "topk": lambda x, i: x.topk(2),
        "cumsum": lambda x, i: x.cumsum(0),
        "searchsorted": lambda x, i: torch.searchsorted(x[0], x),
        "complex_rotation": lambda x, i: torch.polar(x, x) * torch.polar(x, x).conj(),
        "assert_async": lambda x, i: torch._assert_async(x.sum() != 0),
        "constant_on_the_host": lambda x, i: x * torch.tensor(3.0),
        "full": lambda x, i: x * torch.full((), 3.0, device=x.device),
        "tensor_of_a_tensor": lambda x, i: torch.as_tensor(x, device=x.device) + 1,
        "squeeze_in_place": lambda x, i: x[:1].clone().squeeze_() + 1,
        "transpose_in_place": lambda x, i: x.clone().t_() + 1,
        "data": lambda x, i: x.data + 1,
        "rand": lambda x, i: torch.rand_like(x),
        "dropout": lambda x, i: F.dropout(x, 0.5),
        "normal": lambda x, i: torch.normal(x, 1.0),
        "bernoulli": lambda x, i: torch.bernoulli(x / 13),
        "multinomial": lambda x, i: torch.multinomial(x.abs(), 2),
        "exponential": lambda x, i: torch.empty_like(x).exponential_(),
        "default_generator_by_name": lambda x, i: torch.rand(
            4, device=x.device, generator=generator_of(x.device)
        ),
    }
)
"""Stay on the device."""

REFUSED_BY_THE_EMULATOR_ALONE: Mapping[str, Run] = MappingProxyType(
    {
        "tensor_on_the_host": lambda x, i: torch.tensor([1.0, 2.0]),
        "resize": lambda x, i: x.clone().resize_(2, 2),
        "set": lambda x, i: torch.empty(0, device=x.device).set_(x),
        "out_of_the_wrong_shape": lambda x, i: torch.mm(
            x, x.t(), out=torch.empty(0, device=x.device)
        ),
        "copy": lambda x, i: copy.copy(x),
    }
)
"""Change where a tensor's memory is, or freeze what is on the host: CUDA records it, and few mean it."""

REFUSED_BY_CUDA_ALONE: Mapping[str, Run] = MappingProxyType(
    {
        # The number is copied from the host; a tensor of no dimensions, which looks alike here, is not.
        "setitem_number": lambda x, i: set_item(x, i, 3.0),
        "to_the_cpu": lambda x, i: x.to("cpu"),
        "copy_to_the_host": lambda x, i: torch.empty(3, 4).copy_(x),
        "number_on_a_device_by_name": lambda x, i: torch.tensor(3.0, device=x.device.type),
        "save": lambda x, i: torch.save(x, io.BytesIO()),
    }
)
"""Name the CPU, on which everything lies for the emulator, or read memory past torch's functions."""

ON_CUDA: Mapping[str, tuple[Run, Outcome]] = MappingProxyType(
    {
        name: (run, outcome)
        for group, outcome in (
            (HOST_READS, Outcome.REFUSED),
            (HOST_DATA, Outcome.REFUSED),
            (SEEDING, Outcome.REFUSED),
            (RECORDED, Outcome.RECORDED),
            (REFUSED_BY_THE_EMULATOR_ALONE, Outcome.RECORDED),
            (REFUSED_BY_CUDA_ALONE, Outcome.REFUSED),
        )
        for name, run in group.items()
    }
)
"""All operations, and what a capture on CUDA makes of them."""


def record(engine: SegmentEngine, run: Run) -> Callable[[], None]:
    """Warm up and capture ``run``; raises whatever refuses it.

    Returns what replays it on other inputs, and raises AssertionError where that is not what eager computes from them.
    """
    x = torch.arange(1.0, 13, device=engine.device).view(3, 4)
    i = torch.tensor([2, 0, 1], device=engine.device)
    with suppress(Exception), torch.no_grad(), engine.warming_up():
        run(x, i)
    graph = BreakableCUDAGraph(engine)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        replayed = run(x, i)

    def check() -> None:
        x.mul_(0.5)
        i.copy_(i.flip(0))
        # A replay draws the numbers that eager would.
        torch.manual_seed(5)
        graph.replay()
        torch.manual_seed(5)
        with torch.no_grad():
            eager = run(x, i)
        torch.testing.assert_close(tensors_in(replayed), tensors_in(eager))

    return check


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in what an operation returned."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def try_by_name(name: str, device: str) -> Outcome:
    """Try the operation called ``name`` on a new engine; can be sent to another process.

    Raises AssertionError where it is recorded and replays wrongly.
    """
    try:
        check = record(engine_for(device), ON_CUDA[name][0])
    except (RuntimeError, TypeError):
        return Outcome.REFUSED
    check()
    return Outcome.RECORDED
