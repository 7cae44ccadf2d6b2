"""Partial ladders of the search, side by side in arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bcg_harness.tune.budgets import UNLIMITED
from bcg_harness.tune.costs import Floats, Integers

NOBODY = -1
"""The parent of the label that the search begins with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """Hold labels: the ladders that were built so far, from the largest bucket down.

    Suffixes: ``_n`` one entry a label; ``_k`` one entry for each of buckets, nanoseconds of capture, bytes.

    Attributes:
        node_n: number of the smallest bucket so far.
        parent_n: number of the label without it.
        latency_n: of all batches above that bucket, times their weight.
        usage_nk: what the ladder takes.
    """

    node_n: Integers
    parent_n: Integers
    latency_n: Floats
    usage_nk: Integers

    @classmethod
    def first(cls, node: int) -> "Labels":
        """Return the label that the search begins with, at ``node``."""
        return cls(
            node_n=np.array([node]),
            parent_n=np.array([NOBODY]),
            latency_n=np.zeros(1),
            usage_nk=np.zeros((1, 3), np.int64),
        )

    def __len__(self) -> int:
        return len(self.node_n)

    def take(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> "Labels":
        """Return the labels that an index or mask selects."""
        return Labels(
            node_n=self.node_n[which],
            parent_n=self.parent_n[which],
            latency_n=self.latency_n[which],
            usage_nk=self.usage_nk[which],
        )

    def joined(self, other: "Labels") -> "Labels":
        """Return these labels and ``other`` behind them."""
        return Labels(
            node_n=np.concatenate([self.node_n, other.node_n]),
            parent_n=np.concatenate([self.parent_n, other.parent_n]),
            latency_n=np.concatenate([self.latency_n, other.latency_n]),
            usage_nk=np.concatenate([self.usage_nk, other.usage_nk]),
        )

    def undominated(self, limits_k: Integers) -> "Labels":
        """Return the labels of one node that another one of it does not make needless, best first.

        A label is needless when another is no slower and takes no more of what is limited; between equally fast ones,
        that with fewer buckets stays, then the one that is quicker to capture, then the smaller one. Whatever is added
        below adds the same to both, so what is left out can never win.
        """
        buckets_n, nanoseconds_n, bytes_n = self.usage_nk.T
        rest = np.lexsort((bytes_n, nanoseconds_n, buckets_n, self.latency_n))
        limited_nk = self.usage_nk[:, limits_k < UNLIMITED]
        kept = []
        while len(rest):
            best, rest = rest[0], rest[1:]
            kept.append(best)
            rest = rest[(limited_nk[rest] < limited_nk[best]).any(axis=1)]
        return self.take(np.array(kept, np.int64))

    def nodes(self, label: int) -> list[int]:
        """Return the nodes of ``label`` and its parents, down from the last."""
        nodes = []
        while label != NOBODY:
            nodes.append(int(self.node_n[label]))
            label = int(self.parent_n[label])
        return nodes
