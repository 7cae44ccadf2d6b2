"""What a capture was seen to do: the tensors its segments touch, and what its breaks took, made and returned."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from bcg_core.debug.layout import Layout
from bcg_core.errors import DebugError


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in any nesting of tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    """Return a number for the memory that ``tensor`` and all its views share; no other has it while one lives."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Name a break.

    Attributes:
        index: its number in the capture.
        name: of its function.
    """

    index: int
    name: str

    def __str__(self) -> str:
        return f"break {self.index} ({self.name})"


@dataclass(frozen=True, kw_only=True, eq=False)
class Access:
    """Hold that a segment reads or writes some memory; keeps nothing alive, but its number from being given again.

    Attributes:
        layout: of the tensor through which it did so first.
        base: address of the whole memory.
        storage: tells whether the memory is still there.
        where: operation and segment.
    """

    layout: Layout
    base: int
    storage: StorageWeakRef
    where: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """Hold that a break made a tensor.

    Attributes:
        site: the break.
        operation: what made it.
        storage: keeps the number of its memory from being given again.
    """

    site: Site
    operation: str
    storage: StorageWeakRef


class CaptureRecord:
    """Hold what was seen of one capture so far.

    Attributes:
        segments: segments that were begun.
        in_segment: whether operations are being recorded right now.
        site: the break that runs right now, if any.
        accesses: memory that segments read or write, by its number; once the capture is over, without what belongs to
            the segments themselves.
        made: memory that breaks made and have not returned, by its number.
        crossings: tensors that breaks took and returned, with what to call them.
        failure: what a tool refused the capture for.
        finished: whether the capture is over.
        checks: what to call before each replay.
    """

    def __init__(self) -> None:
        self.segments = 0
        self.in_segment = False
        self.site: Site | None = None
        self.accesses: dict[int, Access] = {}
        self.made: dict[int, Made] = {}
        self.crossings: list[tuple[str, Tensor]] = []
        self.failure: DebugError | None = None
        self.finished = False
        self.checks: tuple[Callable[[], None], ...] = ()

    def access(self, tensor: Tensor, where: str) -> None:
        """Note that a segment reads or writes ``tensor``."""
        storage = tensor.untyped_storage()
        memory = memory_of(tensor)
        if storage.nbytes() and memory not in self.accesses:
            self.accesses[memory] = Access(
                layout=Layout.of(tensor),
                base=storage.data_ptr(),
                storage=StorageWeakRef(storage),
                where=where,
            )

    def make(self, tensor: Tensor, site: Site, operation: str) -> None:
        """Note that the break ``site`` made ``tensor``."""
        self.made[memory_of(tensor)] = Made(
            site=site, operation=operation, storage=StorageWeakRef(tensor.untyped_storage())
        )

    def take(self, site: Site, tree: Any) -> None:
        """Note the arguments of a break."""
        self.crossings += _labelled(f"argument of {site}", tree)

    def give(self, site: Site, tree: Any) -> None:
        """Note the result of a break: from here on, segments may use it."""
        self.crossings += _labelled(f"result of {site}", tree)
        for tensor in tensors_in(tree):
            self.made.pop(memory_of(tensor), None)


def _labelled(what: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in ``tree``, numbered if there are several."""
    tensors = tensors_in(tree)
    for number, tensor in enumerate(tensors):
        yield (what if len(tensors) == 1 else f"{what}, tensor {number}"), tensor
