"""The moves of the search: what each further bucket of a ladder costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bcg_harness.tune.costs import Floats, Integers, LadderCosts
from bcg_harness.tune.distribution import TokenDistribution
from bcg_harness.tune.labels import Labels


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """Hold what it costs to go from a bucket to a smaller one.

    Nodes are numbered: 0 is the end, then come the candidates, ascending, and last the beginning. A way from the
    beginning to the end is a ladder, and straight to the end is none at all.

    Suffixes: ``_n`` one entry a node; ``_k`` one entry for each of buckets, nanoseconds of capture, bytes.

    Attributes:
        step_nn: latency, times weight, of the batches between an upper (row) and a lower node.
        usage_nk: what a bucket takes below a larger one.
        first_nk: what it takes as the largest.
    """

    step_nn: Floats
    usage_nk: Integers
    first_nk: Integers

    @classmethod
    def between(
        cls, sizes: Sequence[int], distribution: TokenDistribution, costs: LadderCosts
    ) -> "Moves":
        """Lay out the moves between buckets of ``sizes``, which ascend."""
        tokens, weights = distribution.tokens_n, distribution.weights_n
        below_n = np.searchsorted(tokens, (0, *sizes), side="right")
        served_n = np.concatenate([[0.0], np.cumsum(weights)])[below_n]
        eager = weights * costs.eager(tokens)
        unserved_n = np.concatenate([np.cumsum(eager[::-1])[::-1], [0.0]])[below_n]

        step = np.full((len(sizes) + 2, len(sizes) + 1), np.inf)
        step[1:-1] = costs.replay(sizes)[:, None] * (served_n[1:, None] - served_n)
        step[-1] = unserved_n
        usage = np.zeros((len(sizes) + 1, 3), np.int64)
        usage[1:, 0] = 1
        usage[1:, 1] = costs.capture(sizes)
        usage[1:, 2] = costs.growth(sizes)
        first = usage.copy()
        first[1:, 2] = costs.pool(sizes)
        return cls(step_nn=step, usage_nk=usage, first_nk=first)

    @property
    def beginning(self) -> int:
        """Return the number of the node at which all ladders begin."""
        return len(self.step_nn) - 1

    def taken(self, node: int) -> Integers:
        """Return what each node takes when it comes after ``node``."""
        return self.first_nk if node == self.beginning else self.usage_nk

    def to(self, node: int, labels: Labels) -> Labels:
        """Return what ``labels``, all above ``node``, become when ``node`` comes next."""
        is_first_n = labels.node_n == self.beginning
        taken = np.where(is_first_n[:, None], self.first_nk[node], self.usage_nk[node])
        return Labels(
            node_n=np.full(len(labels), node),
            parent_n=np.arange(len(labels)),
            latency_n=labels.latency_n + self.step_nn[labels.node_n, node],
            usage_nk=labels.usage_nk + taken,
        )

    def cheapest(self, prices_k: Floats) -> tuple[Floats, Integers]:
        """Return of each node the least latency on its way to the end, budgets paid for, and the node that is next.

        Args:
            prices_k: latency that each unit counts for.
        """
        rest_n = np.zeros(self.beginning + 1)
        next_n = np.zeros(self.beginning + 1, np.int64)
        for node in range(1, self.beginning + 1):
            paid = self.taken(node)[:node] @ prices_k
            total = self.step_nn[node, :node] + paid + rest_n[:node]
            next_n[node] = total.argmin()
            rest_n[node] = total[next_n[node]]
        return rest_n, next_n

    def follow(self, next_n: Integers) -> tuple[float, Integers]:
        """Return latency and usage of the ladder that ``next_n`` leads to from the beginning."""
        latency, usage = 0.0, np.zeros(3, np.int64)
        for upper, lower in _pairs(self.beginning, next_n):
            latency += float(self.step_nn[upper, lower])
            usage += self.taken(upper)[lower]
        return latency, usage


def _pairs(node: int, next_n: Integers) -> Iterator[tuple[int, int]]:
    while node:
        yield node, int(next_n[node])
        node = int(next_n[node])
