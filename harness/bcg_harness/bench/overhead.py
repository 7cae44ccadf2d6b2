"""What a break costs that does nothing.

Shape letters: R real tokens, N query heads, K KV heads, H head dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bcg_core import (
    AttentionBackend,
    Capabilities,
    Chunk,
    KVSequence,
    Metadata,
    PagedKVCache,
    PrefillBatch,
    PrefillRunner,
)
from bcg_core.current_device import on_device
from bcg_harness.bench.costs import BreakOverhead
from bcg_harness.bench.mode import Ground
from bcg_harness.bench.spread import Speedup, Spread, Verdict
from bcg_harness.bench.timing import synchronise

_REPEATS = 50
_TOKENS = 256


class NoAttention(AttentionBackend):
    """Leave the attention output as it is: what remains of a prefill is everything else."""

    name = "no attention"
    capabilities = Capabilities(
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        devices=frozenset({"cpu", "cuda"}),
        gqa=True,
        supports_out=True,
        supports_full_graph=True,
        needs_host_plan=False,
    )

    def init_forward_metadata(self, batch: PrefillBatch) -> Metadata:
        """Prepare nothing."""
        return None

    def full_graph_metadata(self, metadata: Metadata, bucket: int) -> Metadata:
        """Prepare nothing."""
        return None

    def warm_up(self, batches: Sequence[PrefillBatch], run: Callable[[PrefillBatch], None]) -> None:
        """Run nothing."""

    def forward(
        self,
        q_RNH: Tensor,
        k_RKH: Tensor,
        v_RKH: Tensor,
        kv_cache: PagedKVCache,
        layer: int,
        metadata: Metadata,
        out_RNH: Tensor | None,
    ) -> Tensor:
        """Return the output rows untouched."""
        assert out_RNH is not None, "the core offers out to a backend that supports it"
        return out_RNH


def measure_break_overhead(ground: Ground) -> BreakOverhead | None:
    """Time replays without attention, in segments and as one graph, of a bucket of 256 tokens or the next larger.

    None where ``breakable`` has captured nothing. Its runner keeps its graphs, and its backend has to be chosen anew.
    The KV cache must have room for one request that fills the bucket.
    """
    runner = ground.runner
    sizes = sorted(runner.graphs)
    if not sizes:
        return None
    bucket = next((size for size in sizes if size >= _TOKENS), sizes[-1])
    runner.use_backend(_no_attention(runner))
    whole = ground.new_runner(ground.model, full_graph=True)
    whole.use_backend(_no_attention(whole))
    whole.capture()
    with_breaks, without = _replays((runner, whole), bucket)
    breaks = len(runner.graphs[bucket].breaks)
    whole.release()
    walls = Spread.of(with_breaks.wall), Spread.of(without.wall)
    told_apart = Speedup.over(*walls).verdict is not Verdict.TOO_CLOSE
    return BreakOverhead(
        bucket=bucket,
        breaks=breaks,
        host_per_break=median(with_breaks.host) / breaks,
        wall_per_break=(walls[0].median - walls[1].median) / breaks if told_apart else None,
    )


@dataclass(frozen=True, kw_only=True)
class Replays:
    """Hold host times and wall-clock times of replays, in seconds."""

    host: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def _no_attention(runner: PrefillRunner) -> NoAttention:
    return NoAttention(runner.backend.spec, runner.limits, runner.model.spec.device)


def _replays(runners: Sequence[PrefillRunner], bucket: int) -> list[Replays]:
    """Replay ``bucket`` with each of ``runners`` in turn, after a prefill that fills it."""
    kv_cache, device = runners[0].kv_cache, runners[0].model.spec.device
    sequence = KVSequence()
    token_ids = [0] * min(bucket, runners[0].limits.max_context)
    for runner in runners:
        chunk = Chunk(token_ids=token_ids, sequence=sequence, prefix_len=0)
        runner.prefill(PrefillBatch.from_chunks([chunk], kv_cache))
    found = [Replays() for _ in runners]
    with torch.inference_mode(), on_device(device):
        for _ in range(_REPEATS):
            for runner, replays in zip(runners, found, strict=True):
                synchronise(device)
                begun = perf_counter()
                runner.graphs[bucket].replay_here()
                replays.host.append(perf_counter() - begun)
                synchronise(device)
                replays.wall.append(perf_counter() - begun)
    kv_cache.free(sequence)
    return found
