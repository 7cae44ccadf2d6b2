"""Shapes of what a recorded operation will make, and the memory that stands for it until then."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from bcg_core.cpu_host_reads import host_read
from bcg_core.cpu_operands import Func, mutated
from bcg_core.errors import CaptureError


class ShapeInference:
    """Propagate shapes, dtypes and strides through operations that are not run."""

    def __init__(self) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def infer(self, func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of ``func`` without their values.

        Raises what the operation itself would raise for its operands, and CaptureError for what cannot be recorded.
        """
        _refuse_layouts(func, (args, kwargs))
        with self._fake:
            fake_args, fake_kwargs = pytree.tree_map_only(Tensor, _shape_only, (args, kwargs))
        try:
            with _quietly(), self._fake:
                shapes = func(*fake_args, **fake_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise host_read(func.name()) from error
        except UnsupportedOperatorException as error:
            raise CaptureError(
                f"{func.name()} has no fake (shape-only) implementation, which the CPU engine needs to record it; "
                "register one with torch.library.register_fake, or call it in a break"
            ) from error
        written = mutated(func, args, kwargs)
        written_shapes = mutated(func, fake_args, fake_kwargs)
        for real, fake in zip(written, written_shapes, strict=True):
            if real.shape != fake.shape:
                raise CaptureError(
                    f"{func.name()} would resize its output from {tuple(real.shape)} to {tuple(fake.shape)}; "
                    "a segment needs outputs of the right shape"
                )
        _refuse_layouts(func, shapes)
        return shapes


def poisoned(shape: Tensor) -> Tensor:
    """Allocate a tensor of that geometry whose values nobody can mistake for results."""
    with torch.inference_mode(False):
        tensor = torch.empty_strided(
            shape.size(), shape.stride(), dtype=shape.dtype, device=shape.device
        )
    if shape.dtype.is_floating_point or shape.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if shape.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(shape.dtype).max)


def _refuse_layouts(func: Func, tree: Any) -> None:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise CaptureError(
                f"{func.name()} takes or makes a tensor of {leaf.layout}, which the CPU engine cannot record; use "
                "dense tensors, or call it in a break"
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep shape propagation from logging or warning of what is raised as an error anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="An output with one or more elements was resized"
            )
            yield
    finally:
        logger.disabled = disabled


def _shape_only(tensor: Tensor) -> Tensor:
    """Return a tensor of that geometry; under a fake mode one without memory.

    Not ``FakeTensorMode.from_tensor``: it follows views to their base, which fails where the dtypes differ (complex
    views), and remembers shapes that a break may have changed since.
    """
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
