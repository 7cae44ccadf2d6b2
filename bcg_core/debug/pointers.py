"""Addresses that a graph has baked in, checked before they are used."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from bcg_core.debug.layout import Layout
from bcg_core.debug.names import tensors_below, weights_below
from bcg_core.debug.record import Access, CaptureRecord, memory_of
from bcg_core.debug.tool import Tool
from bcg_core.errors import StaleTensorError

if TYPE_CHECKING:
    from bcg_core.runner import PrefillRunner

_SHOWN = 4
"""Differences that a message spells out."""


class PointerGuard(Tool):
    """Refuse a replay that would read what somebody has replaced, moved or freed since the capture.

    Guards everything that lies outside of the graph's own memory and that a segment was seen to read or write, the
    weights that an object below ``owners`` lists in ``named_tensors()`` (a kernel that ``torch.compile`` made reads
    them unseen), and the arguments and results of breaks. A tensor is looked for under its name again before each
    replay, so a new weight is found although the old one is still alive.

    Args:
        owners: where names are looked for, by the name that stands in front. A runner that the guard is attached to
            adds its ``model``, ``kv_cache`` and ``workspace``.
    """

    def __init__(self, owners: Mapping[str, object] | None = None) -> None:
        self._given = dict(owners or {})
        self._runner: PrefillRunner | None = None

    def attach(self, runner: "PrefillRunner") -> None:
        """Look for names in what ``runner`` uses, too."""
        self._runner = runner

    def captured(self, record: CaptureRecord) -> Callable[[], None]:
        """Return the check of one graph; refuses a capture whose tensors are gone by its end already."""
        weights = dict(self._weights())
        unlisted = record.accesses.keys() - {memory_of(tensor) for tensor in weights.values()}
        named = {name: x for name, x in self._attributes() if memory_of(x) in unlisted}
        crossings = [(name, tensor, Layout.of(tensor)) for name, tensor in record.crossings]
        covered = {memory_of(x) for x in (*named.values(), *(x for _, x in record.crossings))}
        unnamed = [record.accesses[memory] for memory in unlisted - covered]
        check = _Check(
            guard=self,
            weights={name: Layout.of(tensor) for name, tensor in weights.items()},
            named={name: Layout.of(tensor) for name, tensor in named.items()},
            crossings=crossings,
            unnamed=unnamed,
        )
        check()
        return check

    def _owners(self) -> dict[str, object]:
        runner = self._runner
        if runner is None:
            return self._given
        used = {
            "model": runner.model,
            "kv_cache": runner.kv_cache,
            "workspace": runner.workspace,
        }
        return used | self._given

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for owner in self._owners().values():
            yield from weights_below(owner)

    def _attributes(self) -> Iterator[tuple[str, Tensor]]:
        for name, owner in self._owners().items():
            yield from tensors_below(owner, name)


class _Check:
    """Compare everything that one graph uses with what it was at capture."""

    def __init__(
        self,
        *,
        guard: PointerGuard,
        weights: Mapping[str, Layout],
        named: Mapping[str, Layout],
        crossings: list[tuple[str, Tensor, Layout]],
        unnamed: list[Access],
    ) -> None:
        self._guard = guard
        self._weights = weights
        self._named = named
        self._crossings = crossings
        self._unnamed = unnamed

    def __call__(self) -> None:
        """Raise StaleTensorError for what differs; names come first, as they say what was replaced."""
        problems = [
            *_replaced("weight ", self._weights, dict(self._guard._weights())),
            *_replaced("", self._named, dict(self._guard._attributes())),
            *self._moved(),
            *self._gone(),
        ]
        if not problems:
            return
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StaleTensorError(
            "; ".join(problems[:_SHOWN])
            + more
            + ". The graph goes on using what was there at capture: capture again, "
            "or copy new values into the old tensor"
        )

    def _moved(self) -> Iterator[str]:
        for name, tensor, then in self._crossings:
            change = then.change_to(Layout.of(tensor))
            if change is not None:
                yield f"the {name} was changed after capture: {change}"

    def _gone(self) -> Iterator[str]:
        for access in self._unnamed:
            if access.storage.expired():
                layout = access.layout
                yield (
                    f"a tensor without a name, {layout.shape} {layout.dtype} at {hex(layout.address)}, was freed after "
                    f"capture; {access.where} uses it"
                )


def _replaced(kind: str, then: Mapping[str, Layout], now: Mapping[str, Tensor]) -> Iterator[str]:
    for name, layout in then.items():
        if name not in now:
            yield f"{kind}{name} is gone since capture"
            continue
        change = layout.change_to(Layout.of(now[name]))
        if change is not None:
            yield f"{kind}{name} was replaced after capture: {change}"
