"""Which rows of a result are wrong, in words that lead to them.

Shape letters: R rows (tokens) of one request, N heads, X everything else of a row.
"""

from dataclasses import dataclass

from torch import Tensor

_NAMED_HEADS = 8


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Say which rows of a result are not finite, and which of their heads.

    Attributes:
        count: how many rows.
        rows: of how many.
        first: the first of them.
        heads: heads that are not finite in any row; empty where all are, or where rows have no heads.
    """

    count: int
    rows: int
    first: int
    heads: tuple[int, ...] = ()

    @classmethod
    def of(cls, actual_RX: Tensor) -> "NotFinite | None":
        """Look for them in a result; None when all of it is finite."""
        wrong_RX = ~actual_RX.isfinite()
        wrong_R = wrong_RX.flatten(1).any(1)
        found = wrong_R.nonzero().flatten().tolist()
        if not found:
            return None
        heads: list[int] = []
        if actual_RX.ndim == 3:
            wrong_N = wrong_RX.any(2).any(0)
            heads = [] if bool(wrong_N.all()) else wrong_N.nonzero().flatten().tolist()
        return cls(count=len(found), rows=len(wrong_R), first=found[0], heads=tuple(heads))

    def describe(self, position: int | None) -> str:
        """Say it in words; ``position`` is that of the first row in its sequence, if it has one."""
        verb = "is" if self.count == 1 else "are"
        text = f"{self.count} of {self.rows} rows {verb} not finite"
        if self.heads:
            more = ", ..." if len(self.heads) > _NAMED_HEADS else ""
            text += f" in heads {', '.join(map(str, self.heads[:_NAMED_HEADS]))}{more}"
        return f"{text}, first {place(self.first, position)}"


def place(row: int, position: int | None) -> str:
    """Name ``row``, and its position in the sequence where row 0 is at ``position``."""
    return f"row {row}" if position is None else f"row {row} (position {position + row})"
