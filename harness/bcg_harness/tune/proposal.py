"""The proposed ladder beside what one would have without it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bcg_core import TokenBuckets
from bcg_harness.bench.spread import Speedup
from bcg_harness.errors import HarnessError
from bcg_harness.tune.budgets import LadderBudgets
from bcg_harness.tune.costs import LadderCosts
from bcg_harness.tune.distribution import TokenDistribution
from bcg_harness.tune.estimate import LadderEstimate, estimate
from bcg_harness.tune.search import best_ladder
from bcg_harness.typed_json import to_json

MOST_CANDIDATES = 128
"""More than so many make a search within several budgets slow."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Hold the best ladder for a distribution of batches, and others to compare it with.

    Attributes:
        distribution: what is to be served.
        costs: what buckets cost.
        budgets: limits of the proposed ladder.
        candidates: buckets that it was chosen from.
        proposed: the best ladder within the budgets.
        single: the best one of a single bucket within the other budgets.
        default: ``TokenBuckets.ladder`` up to the largest batch, or to the largest measured bucket; budgets are not
            asked.
        eager: no ladder.
    """

    distribution: TokenDistribution
    costs: LadderCosts
    budgets: LadderBudgets
    candidates: tuple[int, ...]
    proposed: LadderEstimate
    single: LadderEstimate
    default: LadderEstimate
    eager: LadderEstimate

    @property
    def rows(self) -> dict[str, LadderEstimate]:
        """Return all ladders by name, the proposed one first."""
        return {
            "proposed": self.proposed,
            "default": self.default,
            "one bucket": self.single,
            "eager": self.eager,
        }

    def speedup(self, row: LadderEstimate) -> Speedup:
        """Compare a ladder with the default one; what lies within the spread of the measurements is too close."""
        return Speedup.over(self.default.latency, row.latency)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        distribution = self.distribution
        return {
            "backend": self.costs.measured[0].backend,
            "batches": {
                "count": distribution.batches,
                "distinct": len(distribution.tokens_n),
                "mean_tokens": distribution.mean,
                "most_tokens": distribution.largest,
            },
            "budgets": self.budgets.to_json(),
            "candidates": list(self.candidates),
            "ladders": {
                name: {
                    **row.to_json(),
                    "over_budget": bool(row.over(self.budgets)),
                    "speedup_over_default": to_json(self.speedup(row)),
                }
                for name, row in self.rows.items()
            },
        }


def propose(
    distribution: TokenDistribution,
    costs: LadderCosts,
    budgets: LadderBudgets,
    *,
    step: int | None = None,
) -> Proposal:
    """Find the best ladder for ``distribution`` within ``budgets``.

    Args:
        distribution: batches to serve.
        costs: measured.
        budgets: limits.
        step: take multiples of it between the measured buckets as candidates too, at interpolated costs; None proposes
            measured buckets only.

    Raises HarnessError for a step that makes too many candidates.
    """
    candidates = _candidates(costs.sizes, step)
    one = replace(budgets, max_buckets=1)
    ladders = {
        "proposed": best_ladder(distribution, costs, budgets, candidates),
        "single": best_ladder(distribution, costs, one, candidates),
        "default": TokenBuckets.ladder(min(distribution.largest, costs.sizes[-1])),
        "eager": (),
    }
    return Proposal(
        distribution=distribution,
        costs=costs,
        budgets=budgets,
        candidates=candidates,
        **{name: estimate(ladder, distribution, costs) for name, ladder in ladders.items()},
    )


def _candidates(sizes: Sequence[int], step: int | None) -> tuple[int, ...]:
    between = range(0) if step is None else range(-(-sizes[0] // step) * step, sizes[-1], step)
    candidates = tuple(sorted({*sizes, *between}))
    if step is not None and len(candidates) > MOST_CANDIDATES:
        raise HarnessError(
            f"a step of {step} makes {len(candidates)} candidates, at most {MOST_CANDIDATES} are possible: choose a "
            "larger --step"
        )
    return candidates
