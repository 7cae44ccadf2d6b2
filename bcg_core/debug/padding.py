"""Poison for the rows that no request owns, so that whoever reads them shows.

Shape letters: T bucket (padded) tokens, R real tokens, D model dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from bcg_core.debug.tool import Tool
from bcg_core.errors import PaddingLeakError

if TYPE_CHECKING:
    from bcg_core.batch import PrefillBatch
    from bcg_core.runner import PrefillRunner
    from bcg_core.spec import ModelSpec
    from bcg_core.workspace import Workspace


class PaddingPoison(Tool):
    """Poison a runner's memory before each replay, and refuse a result that is not finite after it.

    What the runner and the segments owe is finite rows whatever lay there before: real ones, and padded ones, which are
    computed from token 0 and a cleared attention output. Costs the host a wait for the device.
    """

    @contextmanager
    def around_replay(
        self, runner: "PrefillRunner", batch: "PrefillBatch", padded: int
    ) -> Iterator[None]:
        """Poison, let the replay run, then look at the hidden states of all rows."""
        cache, taken = batch.kv_cache, {page for pages in batch.pages for page in pages}
        foreign = next((page for page in range(1, cache.num_pages) if page not in taken), 0)
        poison(runner.workspace, runner.model.spec, padded, page=foreign, page_size=cache.page_size)
        yield
        finite_T = runner.workspace.hidden_MD[:padded].isfinite().all(dim=1)
        if finite_T.all():
            return
        rows = (~finite_T).nonzero().flatten().tolist()
        real = [row for row in rows if row < batch.num_tokens]
        raise PaddingLeakError(
            f"hidden states of {'real' if real else 'padded'} rows {(real or rows)[:8]} are not finite, in a replay of "
            f"{batch.num_tokens} tokens in bucket {padded} whose memory was poisoned before: something reads rows that "
            "nobody wrote or cleared (or model or backend give such values by themselves: compare with mode='eager')"
        )


def poison(
    workspace: "Workspace", spec: "ModelSpec", padded: int, *, page: int, page_size: int
) -> None:
    """Leave in ``workspace`` what an earlier, longer batch of somebody else might have left there.

    Boundary buffers and hidden states become NaN. Index inputs of ``padded`` rows get values that are valid but wrong,
    as others end a CUDA process: the last token id and position, and the slots of ``page``, of ``page_size``
    tokens, which should belong to no request of the batch to come.
    """
    workspace.boundary.fill_(float("nan"))
    workspace.hidden_MD.fill_(float("nan"))
    if padded > workspace.max_tokens:
        return
    inputs = workspace.inputs(padded)
    inputs.input_ids_T.fill_(spec.vocab_size - 1)
    inputs.positions_T.fill_(spec.max_positions - 1)
    slots_T = torch.arange(padded, device=spec.device) % page_size
    inputs.slot_mapping_T.copy_(slots_T + page * page_size)
