"""What to expect of one ladder."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bcg_harness.bench.spread import Spread
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import NANOSECONDS, Floats, LadderCosts, Quantile
from bcg_harness.tune.distribution import TokenDistribution


@dataclass(frozen=True, kw_only=True)
class LadderEstimate:
    """Hold what is to be expected when a ladder serves a distribution of batches.

    Attributes:
        ladder: its buckets, ascending; empty when everything runs eagerly.
        latency: of a batch, on average over the distribution; each figure is the average of the same figure of the
            measured costs, so the spread is that of the measurements, not that of the batches.
        padding: padded rows as a fraction of all rows computed.
        eager_share: batches that no bucket serves, as a fraction of all.
        capture_seconds: of all buckets.
        memory_bytes: of the graphs.
        interpolated: buckets that were not measured themselves.
    """

    ladder: tuple[int, ...]
    latency: Spread
    padding: float
    eager_share: float
    capture_seconds: float
    memory_bytes: int
    interpolated: tuple[int, ...]

    def over(self, budgets: LadderBudgets) -> tuple[str, ...]:
        """Return the names of the budgets that the ladder breaks."""
        nanoseconds = round(self.capture_seconds * NANOSECONDS)
        usage_k = np.array([len(self.ladder), nanoseconds, self.memory_bytes])
        return tuple(np.array(list(vars(budgets)))[usage_k > budgets.limits_k].tolist())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def estimate(
    ladder: Sequence[int], distribution: TokenDistribution, costs: LadderCosts
) -> LadderEstimate:
    """Estimate what ``ladder``, which is ascending and may be empty, costs and brings."""
    tokens_n, weights_n = distribution.tokens_n, distribution.weights_n
    place_n = np.searchsorted(np.array(ladder, np.int64), tokens_n)
    replayed_n = place_n < len(ladder)
    rows_n = tokens_n.copy()
    rows_n[replayed_n] = np.array(ladder, np.int64)[place_n[replayed_n]]

    def expected(quantile: Quantile) -> float:
        seconds_n: Floats = np.where(
            replayed_n, costs.replay(rows_n, quantile), costs.eager(rows_n, quantile)
        )
        return float(weights_n @ seconds_n) / distribution.weight

    memory = costs.pool(ladder[-1:]).sum() + costs.growth(ladder[:-1]).sum()
    return LadderEstimate(
        ladder=tuple(ladder),
        latency=Spread(
            samples=min(min(cost.replay.samples, cost.eager.samples) for cost in costs.measured),
            median=expected("median"),
            p90=expected("p90"),
            q1=expected("q1"),
            q3=expected("q3"),
        ),
        padding=1 - float(weights_n @ tokens_n) / float(weights_n @ rows_n),
        eager_share=float(weights_n[~replayed_n].sum()) / distribution.weight,
        capture_seconds=float(costs.capture(ladder).sum()) / NANOSECONDS,
        memory_bytes=int(memory),
        interpolated=tuple(size for size in ladder if size not in costs.sizes),
    )
